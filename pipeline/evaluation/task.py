"""What a task of `longhaul evaluate` is given, and what it gives back."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from longhaul.pipeline.load import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says to all tasks; each reads what concerns it."""

    text: tuple[Path, ...] = ()
    """Text files to measure on; none means the run's validation shards."""

    context: int | None = None
    """Tokens of a window, about as many windows' tokens in all; None means as in training."""

    contexts: tuple[int, ...] | None = None
    """Lengths of windows, tokens, ascending; None means some around the training context."""

    stride: int | None = None
    """Tokens that a sliding window moves at a time; None means 256, or the shortest window."""

    lengths: int | None = None
    """Longest passkey prompt, tokens; None means four training contexts."""

    prompts: int = 20
    """Passkey prompts a length; sequences of recall a size."""

    lm_eval_tasks: tuple[str, ...] = ("longhaul_pairs",)
    """Names by which lm_eval knows its tasks; by default the one that longhaul brings."""


@dataclass(frozen=True)
class Measured:
    """Numbers by the names that MLflow shows, and the files that were written."""

    values: dict[str, float]
    files: tuple[Path, ...] = ()


Measure: TypeAlias = Callable[[TrainedModel, Options, Path], Measured]


@dataclass(frozen=True)
class Task:
    """One thing to measure: `measure` writes its files into the folder that it is given."""

    measure: Measure
    help: str
    is_shared: bool = True
    """Done by all ranks, each with its share of the work; otherwise by the first alone."""

    decided_by: tuple[str, ...] = ()
    """Fields of Options without which its result is not known."""


def scaling(trained: TrainedModel, options: Options) -> list[str]:
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
    return "/".join(["evaluation", *scaling(trained, options)])


def label(trained: TrainedModel, options: Options) -> str:
    """Checkpoint and positions, such as step-000000030-linear-4: results of each stay apart."""
    return "-".join([trained.checkpoint.name, *scaling(trained, options)])


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


def read_label(text: str) -> Label | None:
    """What `label` put together; None for any other name."""
    found = re.fullmatch(
        r"step-(\d+)(?:-context-(\d+))?(?:-((?:linear|dynamic_ntk)-[\d.e+]+))?(?:-text-([\w.-]+))?",
        text,
    )
    if found is None:
        return None
    step, context, scaling, name = found.groups()
    return Label(int(step), None if context is None else int(context), scaling or "", name or "")
