"""Names that tell how results were measured: of folders, and of metrics."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longhaul.pipeline.evaluation.task import Options
from longhaul.pipeline.runs.trained_model import TrainedModel


def differences_from_training(trained: TrainedModel, options: Options) -> list[str]:
    """How it was read, such as [context-4096, linear-4]; nothing where it was as in training."""
    positions, context = trained.positions, trained.config.data.context
    found = [] if context == positions.context else [f"context-{context}"]
    if positions.name != "none":
        found.append(f"{positions.name}-{positions.factor:g}")
    if options.text:
        found.append("text-" + _text_name(options.text))
    return found


def _text_name(files: Sequence[Path]) -> str:
    """The first file's name, how many others there are, and a digest of what is in them."""
    first, *others = files
    name = re.sub(r"[^\w.-]", "_", first.stem) + (f"_and_{len(others)}" if others else "")
    parts = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return f"{name}-{hashlib.sha256(parts).hexdigest()[:8]}"


def metric_prefix(trained: TrainedModel, options: Options) -> str:
    """What the names of a task's numbers begin with."""
    return "/".join(["evaluation", *differences_from_training(trained, options)])


def label(trained: TrainedModel, options: Options) -> str:
    """Checkpoint and positions, such as step-000000030-linear-4: results of each stay apart."""
    return "-".join([trained.checkpoint.name, *differences_from_training(trained, options)])


def results_folder(trained: TrainedModel, options: Options) -> Path:
    """Where results so labelled lie."""
    return trained.folder.path / "evaluation" / label(trained, options)


@dataclass(frozen=True)
class Label:
    """What a label tells of how results were measured."""

    step: int
    """Of the checkpoint."""

    context: int | None
    """Tokens of a window, None where it was as in training."""

    scaling: str
    """Of rotary positions, such as linear-4, or empty."""

    text: str
    """Name and digest of the files, or empty for the validation shards."""


def parse_label(text: str) -> Label | None:
    """What `label` put together; None for any other name."""
    found = re.fullmatch(
        r"step-(\d+)(?:-context-(\d+))?(?:-((?:linear|dynamic_ntk)-[\d.e+]+))?(?:-text-([\w.-]+))?",
        text,
    )
    if found is None:
        return None
    step, context, scaling, name = found.groups()
    return Label(int(step), None if context is None else int(context), scaling or "", name or "")
