"""The arguments of `longhaul evaluate` that are options of tasks."""

import argparse
from pathlib import Path

from longhaul.pipeline.commands.arguments import parse_contexts
from longhaul.pipeline.evaluation.task import PASSKEY_DEPTHS, SHORTEST_PASSKEY, Options


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per field of Options."""
    parser.add_argument(
        "--context",
        type=int,
        help="tokens per window, by default as in training; the total hardly changes",
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
        "--lm-eval-tasks",
        default=",".join(Options.lm_eval_tasks),
        metavar="NAME,NAME,...",
        help="lm-eval: tasks of the harness, or the one that longhaul brings; default %(default)s",
    )


def task_options(args: argparse.Namespace) -> Options:
    """The options of tasks that the arguments give."""
    contexts = parse_contexts(args.contexts)
    return Options(
        text=tuple(args.text),
        context=args.context,
        contexts=None if contexts is None else tuple(sorted(set(contexts))),
        stride=args.stride,
        lengths=args.lengths,
        prompts=args.prompts,
        lm_eval_tasks=tuple(args.lm_eval_tasks.split(",")),
    )
