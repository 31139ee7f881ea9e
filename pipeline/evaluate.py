"""`longhaul evaluate`: measure a checkpoint on the validation samples of its run."""

import argparse
import dataclasses
import json
from pathlib import Path

from longhaul.pipeline.atomic import write_atomically
from longhaul.pipeline.evaluation.bigram import bigram_loss, count_bigrams
from longhaul.pipeline.evaluation.held_out import held_out
from longhaul.pipeline.evaluation.positions import draw, measure_positions, summarise, write_table
from longhaul.pipeline.load import TrainedModel, add_model_arguments, load_named_model
from longhaul.pipeline.tracking import Tracker

TASKS = ("positions", "bigram")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--context",
        type=int,
        help="tokens of a window, by default as in training; as many tokens are read in all",
    )
    parser.add_argument(
        "--tasks",
        default="positions",
        help="comma-separated: positions (loss at each position, CSV and PNG), bigram (the loss of "
        "a bigram model counted on the same training text); default %(default)s",
    )


def main(args: argparse.Namespace) -> int:
    tasks = args.tasks.split(",")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"--tasks: found {task!r}, wanted some of {','.join(TASKS)}")
    trained = _with_context(load_named_model(args), args.context)
    destination = trained.folder.path / "evaluation" / _label(trained)
    destination.mkdir(parents=True, exist_ok=True)
    evaluate(trained, tasks, destination)
    return 0


def evaluate(trained: TrainedModel, tasks: list[str], destination: Path) -> None:
    """Run the tasks, write what they found, and show it in MLflow with the checkpoint."""
    config = trained.config
    data = held_out(config)
    values: dict[str, float] = {}
    files: list[Path] = []
    baseline: float | None = None
    if "bigram" in tasks:
        bigram = count_bigrams(data.training_shards(), data.manifest)
        baseline = values["evaluation/bigram_loss"] = bigram_loss(bigram, data.val_dataloader())
    if "positions" in tasks:
        metric = measure_positions(
            trained.model,
            data.val_dataloader(),
            config.data.context,
            trained.device,
            config.trainer.precision,
        )
        prefix = "/".join(["evaluation", *_scaling(trained)])
        values |= summarise(metric.compute()[0], prefix)
        files = [destination / "positions.csv", destination / "positions.png"]
        write_table(files[0], metric)
        draw(files[1], metric, f"{config.name}, {_label(trained)}", baseline)
    results = destination / "results.json"
    write_atomically(results, json.dumps(values, indent=2) + "\n")
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value:.4f} nats a token")
    for file in files:
        print(f"written: {file}")
    _log(trained, values, [results, *files])


def _with_context(trained: TrainedModel, context: int | None) -> TrainedModel:
    """The model with a config whose windows have another length, about as many tokens at a time."""
    positions, config = trained.positions, trained.config
    if positions.name == "dynamic_ntk" and (context or positions.context) <= positions.context:
        raise ValueError(
            f"--context: found {context or positions.context} with dynamic_ntk, which changes "
            f"nothing up to the training context; wanted more than {positions.context}"
        )
    if context is None:
        return trained
    if context < 1:
        raise ValueError(f"--context: found {context}, wanted 1 or more")
    share = config.data.context / context
    data = dataclasses.replace(
        config.data,
        context=context,
        validation_samples=max(1, round(config.data.validation_samples * share)),
    )
    micro_batch = max(1, round(config.trainer.micro_batch * share))
    # RunConfig itself would hold the windows against the size of an update.
    trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
    optim = dataclasses.replace(
        config.optim, tokens_per_update=context * micro_batch * trainer.world_size
    )
    return dataclasses.replace(
        trained, config=dataclasses.replace(config, data=data, trainer=trainer, optim=optim)
    )


def _scaling(trained: TrainedModel) -> list[str]:
    """How it was read, such as [context-4096, linear-4]; nothing where it was as in training."""
    positions, context = trained.positions, trained.config.data.context
    windows = [] if context == positions.context else [f"context-{context}"]
    scaled = [] if positions.name == "none" else [f"{positions.name}-{positions.factor:g}"]
    return [*windows, *scaled]


def _label(trained: TrainedModel) -> str:
    """Checkpoint and positions, such as step-000000030-linear-4: results of each stay apart."""
    return "-".join([trained.checkpoint.name, *_scaling(trained)])


def _log(trained: TrainedModel, values: dict[str, float], files: list[Path]) -> None:
    """The results in MLflow: files with the run, numbers with the checkpoint they belong to."""
    folder, tracking = trained.folder, trained.config.tracking
    tracker = Tracker(
        folder.path,
        uri=tracking.uri,
        experiment=tracking.experiment,
        run_name=trained.config.name,
        is_training=False,
    )
    tracker.start()
    tracker.log_checkpoint(trained.checkpoint, trained.step, values)
    for file in files:
        tracker.log_artifact(file, f"evaluation/{_label(trained)}")
    tracker.finish(None, timeout_s=60.0)
