"""`longhaul evaluate`: measure a checkpoint on held-out text, or on synthetic tasks."""

import argparse
import sys
from pathlib import Path

from longhaul.pipeline.commands.contexts import parse_contexts
from longhaul.pipeline.commands.model_arguments import add_model_arguments, named_model
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.task import PASSKEY_DEPTHS, SHORTEST_PASSKEY, Options
from longhaul.pipeline.tracking.journal import EXIT_BUSY, JournalBusyError


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
        help="names from the list below, separated by commas; default %(default)s",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="tokens per window, by default as in training; about as many tokens are read in total",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="text to measure on instead of validation shards; repeat the option for more files",
    )
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        help="lengths of windows in tokens; default of the task context: 1/4 to 4 training "
        "contexts; of perplexity: 1, 2 and 4 training contexts",
    )
    parser.add_argument(
        "--stride",
        type=int,
        help="perplexity: tokens by which the window slides; default 256, or the shortest window",
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
        help=f"passkey: prompts per length, at each of {len(PASSKEY_DEPTHS)} depths in turn; "
        "recall: sequences per number of pairs; default %(default)s",
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
        help="lm-eval: tasks of the harness, or the one that longhaul brings; default %(default)s",
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat tasks that already have results"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.evaluation.run import evaluate_checkpoint

    contexts = parse_contexts(args.contexts)
    options = Options(
        text=tuple(args.text),
        context=args.context,
        contexts=None if contexts is None else tuple(sorted(set(contexts))),
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
