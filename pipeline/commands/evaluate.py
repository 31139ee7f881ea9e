"""`longhaul evaluate`: measure a checkpoint, on held-out text or on tasks made for it."""

import argparse
import sys
from pathlib import Path

from longhaul.pipeline.commands.model_arguments import add_model_arguments, named_model
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.task import PASSKEY_DEPTHS, SHORTEST_PASSKEY, Options
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, TASKS))
    parser.epilog = "tasks:\n" + "\n".join(
        f"  {name:<{width}}  {task.help}" for name, task in TASKS.items()
    )
    parser.add_argument(
        "--tasks",
        default="positions",
        help="comma-separated, of those listed below; default %(default)s",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="tokens of a window, by default as in training; as many tokens are read in all",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="text to measure on instead of the validation shards; again for more files",
    )
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        help="lengths of windows, tokens: by default 1/4 to 4 times the training context for "
        "context, 1, 2 and 4 times it for perplexity",
    )
    parser.add_argument(
        "--stride",
        type=int,
        help="tokens by which the window of perplexity slides; default 256, or a shorter window",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        metavar="N",
        help=f"passkey: lengths are powers of two from {SHORTEST_PASSKEY} to this many tokens; "
        "default 4 training contexts",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=Options.prompts,
        help="passkey: prompts a length, in turn at each of "
        f"{len(PASSKEY_DEPTHS)} depths; recall: sequences a size; default %(default)s",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="processes that share the work, one device each; default %(default)s",
    )
    parser.add_argument(
        "--lm-eval-tasks",
        default=",".join(Options.lm_eval_tasks),
        metavar="NAME,NAME,...",
        help="lm-eval: which of the harness's tasks, or the one that longhaul brings; default "
        "%(default)s",
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat tasks whose results are already there"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.evaluation.run import evaluate_checkpoint

    if args.devices < 1:
        raise ValueError(f"--devices: found {args.devices}, wanted 1 or more")
    if args.context is not None and args.context < 1:
        raise ValueError(f"--context: found {args.context}, wanted 1 or more")
    options = Options(
        text=tuple(args.text),
        context=args.context,
        contexts=_contexts(args.contexts),
        stride=args.stride,
        lengths=args.lengths,
        prompts=args.prompts,
        lm_eval_tasks=tuple(args.lm_eval_tasks.split(",")),
    )
    named, names = named_model(args), args.tasks.split(",")
    try:
        evaluate_checkpoint(named, names, options, devices=args.devices, again=args.again)
    except JournalBusyError as error:
        print(f"longhaul: {error}", file=sys.stderr)
        return EXIT_BUSY
    return 0


def _contexts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ValueError(f"--contexts: found {text!r}, wanted numbers of 1 or more, such as 64,128")
    return tuple(sorted({int(part) for part in text.split(",")}))
