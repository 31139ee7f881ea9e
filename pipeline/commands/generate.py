"""`longhaul generate`: continue prompts; each token has constant cost for linear-cost kinds."""

import argparse
from pathlib import Path

from longhaul.pipeline.arguments import add_model_arguments, named_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; repeat the option for more texts, each printed below its number",
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 chooses the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="choose only among the k likeliest tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        help="choose only among the likeliest tokens whose probabilities sum to p",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the sampling; each further prompt has the next one (%(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeat the option for more texts",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="a saved state; prompts follow the text that it has read",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations: with bfloat16 a token reads half as much of a GPU's "
        "memory; rates and gates that are summed over tokens stay in float32 (%(default)s)",
    )
    parser.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of states of fixed size: with bfloat16 a token reads and writes half as much of a "
        "GPU's memory, at the cost of an error that docs/kernels.md gives (%(default)s)",
    )
    parser.add_argument(
        "--save-state",
        type=Path,
        metavar="FILE",
        help="save the state after the last token here, to continue from it with --state",
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.run_folders import named_run
    from longhaul.pipeline.generation.options import GenerationOptions

    options = GenerationOptions(
        prompts=args.prompt,
        num_tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        state=args.state,
        has_bfloat16_weights=args.dtype == "bfloat16",
        has_bfloat16_state=args.state_dtype == "bfloat16",
        save_state=args.save_state,
    )
    named_run(args.run)
    named = named_model(args, args.run)
    # After the options are checked, since these imports take seconds.
    from longhaul.pipeline.generation.run import generate
    from longhaul.pipeline.runs.trained_model import load_trained_model

    generate(load_trained_model(*named), options)
    return 0
