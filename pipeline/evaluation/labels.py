"""Names of result folders and metrics, which say how the results were measured."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longhaul.pipeline.evaluation.options import TaskOptions
from longhaul.pipeline.runs.trained_model import TrainedModel

BYTES_PER_TOKEN = "evaluation/bytes_per_token"
"""The metric of the validation text, from which reports compute bits per byte."""


def differences_from_training(trained: TrainedModel, options: TaskOptions) -> list[str]:
    """How reading differs from training, such as [context-4096, linear-4]; empty if it does not."""
    positions, context = trained.positions, trained.config.data.context
    differences = [] if context == positions.context else [f"context-{context}"]
    if positions.name != "none":
        differences.append(f"{positions.name}-{positions.factor:g}")
    if text := getattr(options, "text", ()):  # not every task reads texts
        differences.append("text-" + _text_name(text))
    return differences


def _text_name(files: Sequence[Path]) -> str:
    """The first file's name, the number of other files, and a digest of the contents of all."""
    first, *others = files
    name = re.sub(r"[^\w.-]", "_", first.stem) + (f"_and_{len(others)}" if others else "")
    digests = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return f"{name}-{hashlib.sha256(digests).hexdigest()[:8]}"


def metric_prefix(trained: TrainedModel, options: TaskOptions) -> str:
    """What the metric names of a task begin with."""
    return "/".join(["evaluation", *differences_from_training(trained, options)])


def label(trained: TrainedModel, options: TaskOptions) -> str:
    """Name of the results of a checkpoint read in one way, such as step-000000030-linear-4."""
    return "-".join([trained.checkpoint.name, *differences_from_training(trained, options)])


def results_folder(trained: TrainedModel, options: TaskOptions) -> Path:
    """The folder of the results that have this label."""
    return trained.folder.path / "evaluation" / label(trained, options)


@dataclass(frozen=True)
class Label:
    """What a label says about how results were measured."""

    step: int
    """Of the checkpoint."""

    context: int | None
    """Tokens per window; None means as in training."""

    scaling: str
    """Of rotary positions, such as linear-4; empty means none."""

    text: str
    """Name and digest of the text files; empty means the validation shards."""


def parse_label(text: str) -> Label | None:
    """The parts of a name that `label` made; None for any other name."""
    match = re.fullmatch(
        r"step-(\d+)(?:-context-(\d+))?(?:-((?:linear|dynamic_ntk)-[\d.e+]+))?(?:-text-([\w.-]+))?",
        text,
    )
    if match is None:
        return None
    step, context, scaling, name = match.groups()
    return Label(int(step), None if context is None else int(context), scaling or "", name or "")
