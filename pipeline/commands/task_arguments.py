"""The arguments of `longhaul evaluate` that are options of tasks."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.pipeline.commands.arguments import parse_contexts
from longhaul.pipeline.evaluation.registry import TASKS, check_tasks
from longhaul.pipeline.evaluation.task import PASSKEY_DEPTHS, SHORTEST_PASSKEY, Options


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per field of Options."""
    parser.add_argument(
        "--context",
        metavar="N",
        help="tokens per window, by default as in training; the total hardly changes; with the "
        "tasks context and perplexity the same as --contexts",
    )
    parser.add_argument(
        "--text",
        action="extend",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="texts to measure on instead of validation shards; stands after RUN, or RUN would "
        "be read as one of them",
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
        "--document-tokens",
        type=int,
        metavar="N",
        help="perplexity: read only the first N tokens of each document, at least as many as the "
        "longest window; default the whole text, cut into documents as long as that window",
    )
    parser.add_argument(
        "--no-bos",
        action="store_true",
        help="perplexity, passkey, scores: read without the beginning-of-sequence id in front",
    )
    parser.add_argument(
        "--lengths",
        metavar="N,N,...",
        help="passkey: lengths of prompts in tokens; default powers of two from "
        f"{SHORTEST_PASSKEY} to 4 training contexts",
    )
    parser.add_argument(
        "--depths",
        choices=("grid", "random"),
        default=Options.depths,
        help=f"passkey: where the key stands, at each of {len(PASSKEY_DEPTHS)} depths in turn, or "
        "anywhere; default %(default)s",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=Options.prompts,
        help="passkey: prompts per length; recall: sequences per number of pairs; default "
        "%(default)s",
    )
    parser.add_argument(
        "--lm-eval-tasks",
        default=",".join(Options.lm_eval_tasks),
        metavar="NAME,NAME,...",
        help="lm-eval: tasks of the harness, or the one that longhaul brings; default %(default)s",
    )
    parser.add_argument(
        "--lm-eval-limit", type=int, metavar="N", help="lm-eval: read N documents of each task"
    )
    parser.add_argument(
        "--lm-eval-shots",
        type=int,
        metavar="N",
        help="lm-eval: put N solved examples in front of each document; default the task's own",
    )
    parser.add_argument(
        "--lm-eval-metadata",
        metavar="JSON",
        help="lm-eval: for tasks that make their documents, such as "
        "'{\"max_seq_lengths\": [4096]}' for ruler",
    )
    parser.add_argument(
        "--lm-eval-generation",
        metavar="JSON",
        help="lm-eval: arguments of generation instead of the task's, such as "
        "'{\"max_gen_toks\": 32}'",
    )
    parser.add_argument(
        "--lm-eval-samples",
        action="store_true",
        help="lm-eval: write each document with the model's answer",
    )


def task_options(args: argparse.Namespace, names: Sequence[str]) -> Options:
    """The options that the arguments give for the tasks of these names."""
    context, contexts = parse_contexts(args.context, "--context"), parse_contexts(args.contexts)
    check_tasks(names, "--tasks")
    read = [TASKS[name].decided_by for name in names]
    if contexts is None and all("contexts" in one and "context" not in one for one in read):
        context, contexts = None, context
    if context is not None and len(context) > 1:
        raise ValueError(
            f"--context: found {args.context} with {args.tasks}, wanted one number, or the tasks "
            "context and perplexity alone, which read several"
        )
    lengths = parse_contexts(args.lengths, "--lengths")
    return Options(
        text=tuple(args.text),
        context=None if context is None else context[0],
        contexts=None if contexts is None else tuple(sorted(set(contexts))),
        stride=args.stride,
        document_tokens=args.document_tokens,
        no_bos=args.no_bos,
        lengths=None if lengths is None else tuple(sorted(set(lengths))),
        depths=args.depths,
        prompts=args.prompts,
        lm_eval_tasks=tuple(args.lm_eval_tasks.split(",")),
        lm_eval_limit=args.lm_eval_limit,
        lm_eval_shots=args.lm_eval_shots,
        lm_eval_metadata=_parse_object("--lm-eval-metadata", args.lm_eval_metadata),
        lm_eval_generation=_parse_object("--lm-eval-generation", args.lm_eval_generation),
        lm_eval_samples=args.lm_eval_samples,
    )


def _parse_object(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{option}: found {text!r}, wanted a JSON object such as {{"name": 1}}')
    return found
