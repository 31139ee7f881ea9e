"""`longhaul evaluate`: measure a checkpoint, on held-out text or on tasks made for it."""

import argparse
import dataclasses
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from longhaul.configs import RunConfig
from longhaul.datamodules.manifest import load_manifest
from longhaul.pipeline.evaluation import (
    attention,
    bigram,
    context,
    lm_eval,
    passkey,
    perplexity,
    positions,
    recall,
)
from longhaul.pipeline.evaluation.ranks import Ranks, measure_together
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import Measured, Options, Task, label, results_folder
from longhaul.pipeline.evaluation.windows import with_context
from longhaul.pipeline.journal import EXIT_BUSY, JournalBusyError
from longhaul.pipeline.load import (
    TrainedModel,
    add_model_arguments,
    find_checkpoint,
    load_named_model,
)
from longhaul.pipeline.tracking import Tracker

# In this order they run: the figure of positions shows the bigram's loss.
TASKS: dict[str, Task] = {
    "bigram": bigram.TASK,
    "positions": positions.TASK,
    "context": context.TASK,
    "perplexity": perplexity.TASK,
    "passkey": passkey.TASK,
    "recall": recall.TASK,
    "attention": attention.TASK,
    "lm-eval": lm_eval.TASK,
}


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
        help=f"passkey: lengths are powers of two from {passkey.SHORTEST} to this many tokens; "
        "default 4 training contexts",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=Options.prompts,
        help="passkey: prompts a length, in turn at each of "
        f"{len(passkey.DEPTHS)} depths; recall: sequences a size; default %(default)s",
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
    if args.devices < 1:
        raise ValueError(f"--devices: found {args.devices}, wanted 1 or more")
    if torch.cuda.is_available() and args.devices > torch.cuda.device_count():
        raise ValueError(
            f"--devices: found {args.devices}, wanted at most {torch.cuda.device_count()}, the "
            "GPUs that are here"
        )
    _check_input(args)
    try:
        measure_together(args.devices, _measure, args)
    except JournalBusyError as error:
        print(f"longhaul: {error}", file=sys.stderr)
        return EXIT_BUSY
    return 0


def _check_input(args: argparse.Namespace) -> None:
    """Raise for what can be told without a model, before several processes would."""
    names = args.tasks.split(",")
    check_tasks(names, "--tasks")
    _check_read(names, _options(args))
    for file in args.text:
        if not file.is_file():
            raise ValueError(f"--text: found no file {file}, wanted text in UTF-8")
    find_checkpoint(args.run)


def _measure(ranks: Ranks, args: argparse.Namespace) -> None:
    names, options = args.tasks.split(","), _options(args)
    trained = dataclasses.replace(load_named_model(args), ranks=ranks)
    if "positions" in names:
        _check_scaled(trained, options.context)
    if options.context is not None:
        config = with_context(trained.config, options.context)
        trained = dataclasses.replace(trained, config=config)
    evaluate(trained, names, options, again=args.again)


def _check_read(names: Sequence[str], options: Options) -> None:
    """ValueError for an option that tasks would pass over."""
    for field in dataclasses.fields(Options):
        if getattr(options, field.name) == field.default:
            continue
        others = [name for name in names if field.name not in TASKS[name].decided_by]
        # The results of all tasks are named by the text and the context.
        if len(others) == len(names) or (others and field.name in ("text", "context")):
            option = "--" + field.name.replace("_", "-")
            raise ValueError(
                f"{option}: found with {others[0]}, which does not read it; wanted other tasks"
            )


def _options(args: argparse.Namespace) -> Options:
    if args.context is not None and args.context < 1:
        raise ValueError(f"--context: found {args.context}, wanted 1 or more")
    return Options(
        text=tuple(args.text),
        context=args.context,
        contexts=_contexts(args.contexts),
        stride=args.stride,
        lengths=args.lengths,
        prompts=args.prompts,
        lm_eval_tasks=tuple(args.lm_eval_tasks.split(",")),
    )


def check_tasks(names: Sequence[str], where: str) -> None:
    """ValueError that names the first that is no task."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"{where}: found {name!r}, wanted some of {','.join(TASKS)}")


def _contexts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ValueError(f"--contexts: found {text!r}, wanted numbers of 1 or more, such as 64,128")
    return tuple(sorted({int(part) for part in text.split(",")}))


def evaluate(
    trained: TrainedModel,
    names: Sequence[str],
    options: Options,
    tracker: Tracker | None = None,
    *,
    again: bool = False,
) -> None:
    """Run the tasks; keep what each found, and show it in MLflow with the checkpoint, at once.

    All of `trained.ranks` call it alike. The first has the books; where the run is being trained,
    `tracker` is its own.
    """
    ranks = trained.ranks
    if not ranks.is_first:
        (missing,) = ranks.gather(list[list[str]]())
        for name in missing:
            if TASKS[name].is_shared:
                with tempfile.TemporaryDirectory() as scratch:
                    TASKS[name].measure(trained, options, Path(scratch))
        return
    results = Results(results_folder(trained, options), _held_out(trained.config))
    wanted = {name: task for name, task in TASKS.items() if name in names}
    known = {n: None if again else results.known(n, task, options) for n, task in wanted.items()}
    ranks.gather([[name for name, found in known.items() if found is None]])
    for name, task in wanted.items():
        found = known[name]
        if found is not None:
            print(f"{name}: found earlier, and not repeated without --again")
            results.summarise()  # which may be damaged, or not there
        else:
            # What was found before stays until there is something else.
            with tempfile.TemporaryDirectory() as scratch:
                found = results.take(name, task.measure(trained, options, Path(scratch)))
            _log(trained, options, found, results.summary, tracker)
            # Last: what is known is not logged again.
            results.record(name, task, options, found)
        _show(found)


def _held_out(config: RunConfig) -> str:
    """Tells held-out texts apart: by their shards, and how much of them is read."""
    if config.data.validation_manifest is None:
        return ""
    shards = load_manifest(config.data.validation_manifest).shards
    digest = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    return f"{config.data.validation_tokens} tokens of {digest}"


def _show(found: Measured) -> None:
    width = max(map(len, found.values), default=0)
    for name, value in found.values.items():
        unit = " nats a token" if "loss" in name.rpartition("/")[2] else ""
        print(f"{name:<{width}}  {value:.4f}{unit}")
    for file in found.files:
        print(f"written: {file}")


def _check_scaled(trained: TrainedModel, context: int | None) -> None:
    """ValueError where windows are too short for what was asked of positions to show."""
    positions = trained.positions
    if positions.name == "dynamic_ntk" and (context or positions.context) <= positions.context:
        raise ValueError(
            f"--context: found {context or positions.context} with dynamic_ntk, which changes "
            f"nothing up to the training context; wanted more than {positions.context}"
        )


def _log(
    trained: TrainedModel,
    options: Options,
    found: Measured,
    summary: Path,
    tracker: Tracker | None,
) -> None:
    """The results in MLflow: files with the run, numbers with the checkpoint they belong to."""
    folder, tracking = trained.folder, trained.config.tracking
    own = tracker or Tracker(
        folder.path,
        uri=tracking.uri,
        experiment=tracking.experiment,
        run_name=trained.config.name,
        is_training=False,
    )
    if tracker is None:
        own.start()
    own.log_checkpoint(trained.checkpoint, trained.step, found.values)
    for file in (summary, *found.files):
        own.log_artifact(file, f"evaluation/{label(trained, options)}")
    if tracker is None:
        own.finish(None, timeout_s=60.0)
