"""`longhaul generate`: continue prompts, one token at a time at constant cost for linear kinds."""

import argparse
import math
from pathlib import Path

from longhaul.pipeline.commands.model_arguments import add_model_arguments, named_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; again for more, each then printed below a line with its number",
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens to add (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        help="choose among the likeliest tokens only whose probabilities sum to p",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the sampling, the same for each prompt (%(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; again for more",
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="a saved state; prompts follow what it has seen"
    )
    parser.add_argument(
        "--save-state",
        type=Path,
        metavar="FILE",
        help="where to keep the state after the last token, to continue from with --state",
    )


def main(args: argparse.Namespace) -> int:
    _check(args)
    from longhaul.pipeline.generation.run import generate
    from longhaul.pipeline.runs.trained_model import load_trained_model

    generate(
        load_trained_model(*named_model(args)),
        args.prompt or [""],
        num_tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        state=args.state,
        save_state=args.save_state,
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.prompt and args.state is None:
        raise ValueError("--prompt: found none, wanted one or more, or --state")
    if args.tokens < 1:
        raise ValueError(f"--tokens: found {args.tokens}, wanted 1 or more")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature: found {args.temperature}, wanted 0 or more")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k: found {args.top_k}, wanted 1 or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p: found {args.top_p}, wanted more than 0, and 1 at most")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed: found {args.seed}, wanted 0 to 2**63 - 1")
    if "" in args.stop:
        raise ValueError("--stop: found an empty text, wanted a character or more")
    if args.save_state is not None and len(args.prompt) > 1:
        raise ValueError(
            f"--save-state: found {len(args.prompt)} prompts, wanted one: a file holds one state"
        )
    if args.save_state is not None and args.save_state.is_dir():
        raise ValueError(f"--save-state: found the folder {args.save_state}, wanted a file")
    if args.save_state is not None and not args.save_state.absolute().parent.is_dir():
        raise ValueError(f"--save-state: found no folder {args.save_state.parent}, wanted one")
