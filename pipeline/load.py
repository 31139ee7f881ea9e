"""A trained model from a run folder or from one of its checkpoints."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longhaul.configs import ConfigError, RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.checkpoint import Saved, newest_checkpoint
from longhaul.pipeline.evaluation.ranks import ALONE, Ranks
from longhaul.pipeline.exporting.model_files import (
    exported_shape,
    exported_weights,
    is_exported,
    shape_of,
)
from longhaul.pipeline.run_folder import RunFolder, locate, stored_config


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, and where it came from."""

    model: LanguageModel
    config: RunConfig
    folder: RunFolder
    checkpoint: Path
    step: int
    device: torch.device
    positions: PositionScaling
    ranks: Ranks = ALONE
    """The processes that measure it together."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that reads a trained model."""
    parser.add_argument("run", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "--positions",
        default="none",
        metavar="none|linear|dynamic_ntk",
        help="how rotary positions are scaled; default %(default)s",
    )
    parser.add_argument(
        "--factor", type=float, help="times by which the context is to grow, with --positions"
    )


def load_named_model(args: argparse.Namespace) -> TrainedModel:
    """The model that a command line names; raises as `load_trained_model` does."""
    if args.factor is not None and args.positions == "none":
        raise ValueError(
            f"--factor: found {args.factor:g} with --positions none, wanted linear or dynamic_ntk"
        )
    if args.factor is None and args.positions != "none":
        raise ValueError(f"--factor: missing, and --positions {args.positions} needs one")
    return load_trained_model(args.run, args.positions, 1.0 if args.factor is None else args.factor)


def load_trained_model(
    run_or_checkpoint: str | Path, positions: str = "none", factor: float = 1.0
) -> TrainedModel:
    """The model of a checkpoint, or of the newest whole one of a run.

    Args:
        run_or_checkpoint: the path of either.
        positions: none, linear or dynamic_ntk; the run's own context is what it was trained at.
        factor: times by which the context is to grow.

    Raises:
        ValueError: the path is neither, the run has no checkpoint yet, or a layer of the model
            has no such positions.
        CheckpointError: the checkpoint is damaged.
    """
    folder, checkpoint = find_checkpoint(run_or_checkpoint)
    config = stored_config(folder)
    scaling = PositionScaling(name=positions, factor=factor, context=config.data.context)
    saved = Saved(checkpoint, "model")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    model.set_positions(scaling)
    model.load_state_dict(saved.read_group("model"), assign=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    step = int(saved.state["progress"]["step"])
    return TrainedModel(model, config, folder, checkpoint, step, device, scaling)


def load_start(model: LanguageModel, start_from: str) -> Path:
    """Give a new model the weights of a checkpoint or of an exported folder.

    Its model has the same config, but for initial states and the op's chunks. Initial states that
    it lacks stay as they are.

    Returns:
        The checkpoint, or the folder.

    Raises:
        ConfigError: there is none, it is that of another model, or an exported folder is damaged.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        source, before, now = _described(start_from, model.config)
    except ValueError as error:
        raise ConfigError(f"trainer.start_from: {error}") from error
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"trainer.start_from: found {key} {before.get(key)!r} in {source}, "
                f"wanted {now.get(key)!r} as in this run's model"
            )
    try:
        found = (
            exported_weights(source)
            if is_exported(source)
            else Saved(source, "model").read_group("model")
        )
    except ValueError as error:
        raise ConfigError(f"trainer.start_from: {error}") from error
    wanted = model.state_dict()
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found and "initial_state" in name.split("."):
            continue
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            raise ConfigError(
                f"trainer.start_from: found {_shape(found.get(name))} for {name} in {source}, "
                f"wanted {_shape(wanted.get(name))} as in this run's model"
            )
    model.load_state_dict(found, strict=False)
    return source


def _described(
    start_from: str, model: LanguageModelConfig
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Where weights lie, and what decides their meaning there and in a model, in the same words."""
    if is_exported(start_from):
        source = Path(start_from)
        return source, _decisive(exported_shape(source)), _decisive(shape_of(model))
    folder, checkpoint = find_checkpoint(start_from)
    before = {"model": to_dict(stored_config(folder).model)}
    return checkpoint, _decisive(before), _decisive({"model": to_dict(model)})


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path]:
    """The folder of a run, and the checkpoint that a path names or the run's newest whole one.

    Raises ValueError where there is none.
    """
    folder, checkpoint = locate(run_or_checkpoint)
    checkpoint = checkpoint or newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run_or_checkpoint}: found no whole checkpoint, wanted one")
    return folder, checkpoint


def _decisive(values: dict[str, Any]) -> dict[str, Any]:
    """What of a model's config decides what its weights mean."""
    free = ("initial_state", "rank", "chunk_size")
    return {key: v for key, v in flatten(values).items() if key.rsplit(".", 1)[-1] not in free}


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
