"""Reads the CSV tables that tasks of `longhaul evaluate` wrote, perhaps on another machine."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from longhaul.datamodules.files.untrusted import one_line, parse_row, shown
from longhaul.pipeline.evaluation.labels import Label, parse_label
from longhaul.pipeline.tracking.mlflow_limits import short_error

T = TypeVar("T")

_MOST_ROWS = 4_000_000

MOST_LOSS = 1e6
"""Nats per token beyond which a loss is taken for an error; a uniform guess has 18 at most."""

_MOST = 1e30  # of scores and weights: sums and ratios of them are finite, and can be drawn


def _number(
    low: float, high: float, *, or_nan: bool = False, or_inf: bool = False
) -> Callable[[float], float]:
    """A check that a number can be averaged and drawn."""

    def check(value: float) -> float:
        if low <= value <= high or (or_nan and math.isnan(value)) or (or_inf and value == math.inf):
            return value
        raise ValueError(f"found {value:g}, wanted {low:g} to {high:g}")

    return check


Loss = Annotated[float, AfterValidator(_number(0, MOST_LOSS))]
"""Nats per token."""

_Error = Annotated[float, AfterValidator(_number(0, MOST_LOSS, or_nan=True))]
"""A standard error in nats; NaN where there was one window."""

_AtLeastOne = Annotated[float, AfterValidator(_number(1, 1e100))]
_Magnitude = Annotated[float, AfterValidator(_number(0, _MOST))]
_Score = Annotated[float, AfterValidator(_number(-_MOST, _MOST))]
_Share = Annotated[float, AfterValidator(_number(0, 1))]
_Kurtosis = Annotated[float, AfterValidator(_number(-_MOST, _MOST, or_nan=True))]
_Spread = Annotated[float, AfterValidator(_number(0, _MOST, or_nan=True))]
_HalfLife = Annotated[float, AfterValidator(_number(0, _MOST, or_inf=True))]
_Rotation = Annotated[float, AfterValidator(_number(-_MOST, _MOST, or_nan=True))]
Count = Annotated[int, Field(ge=0, le=1 << 50)]
Positive = Annotated[int, Field(ge=1, le=1 << 50)]
"""Numbers of tokens, layers and answers. A float holds each of them exactly, also sums of a few."""

_Bos = Literal["yes", "no", "unknown"]
"""Whether the beginning-of-sequence id is in front; earlier tables do not say."""


@dataclass(frozen=True)
class Evaluated:
    """The table that one task wrote."""

    label: Label
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class _Positions:
    position: Positive
    loss_nats: Loss
    mean_up_to_here: Loss
    standard_error: _Error = math.nan
    standard_error_up_to_here: _Error = math.nan


@dataclass(frozen=True)
class _Bins:
    first: Positive
    last: Positive
    loss_nats: Loss
    standard_error: _Error


@dataclass(frozen=True)
class _Context:
    context: Positive
    tokens: Count
    loss_nats: Loss
    standard_error: _Error = math.nan


@dataclass(frozen=True)
class _Perplexity:
    window: Positive
    stride: Positive
    perplexity: _AtLeastOne
    tokens: Count = 0
    standard_error: _Error = math.nan
    document_tokens: Positive | Literal["all", "unknown"] = "unknown"
    bos: _Bos = "unknown"


@dataclass(frozen=True)
class _Passkey:
    length: Positive
    prompts: Positive
    right: Count
    depths: Literal["grid", "random", "unknown"] = "unknown"
    bos: _Bos = "unknown"


@dataclass(frozen=True)
class _Recall:
    pairs: Positive
    queries: Positive
    right: Count
    chance: _Share
    low: _Share
    high: _Share


@dataclass(frozen=True)
class _Attention:
    layer: Count
    matrix: Count
    largest: _Magnitude
    first_token_share: _Share
    kurtosis: _Kurtosis
    half_life: _HalfLife
    rotation: _Rotation
    # Earlier tables are of one window, and have no errors.
    first_token_share_standard_error: _Spread = math.nan
    kurtosis_standard_error: _Spread = math.nan
    half_life_standard_error: _Spread = math.nan
    windows: Positive = 1


@dataclass(frozen=True)
class _Scores:
    layer: Positive
    key: Positive
    score: _Score
    least_of_heads: _Score
    most_of_heads: _Score
    largest: _Magnitude
    bos: _Bos = "unknown"


# The column of each count of right answers that says how many there are at most.
_ASKED = {"passkey": "prompts", "recall": "queries"}

TABLES: dict[str, Any] = {
    "positions": _Positions,
    "loss_in_bins": _Bins,
    "context": _Context,
    "perplexity": _Perplexity,
    "passkey": _Passkey,
    "recall": _Recall,
    "attention": _Attention,
    "scores": _Scores,
}
"""The tables of tasks that are read, by their names without .csv, and the columns that they must
have; others may follow. All but loss_in_bins, of the task positions, are named after their task."""


def read_table(task: str, text: str, where: str) -> list[dict[str, Any]]:
    """The rows of a table: its columns as its schema has them, others as text.

    Raises:
        ValueError: the table has something else; the row and the column are named.
    """
    rows: list[dict[str, Any]] = []
    schema = TABLES[task]
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        for number, row in enumerate(reader, start=1):
            if number > _MOST_ROWS:
                raise ValueError(f"{where}: found more than {_MOST_ROWS:,} rows")
            # csv puts cells beyond the last column under None.
            if extra := row.pop(None, None):
                raise ValueError(
                    f"{where}: row {number}: found {shown(extra)} after the last column, wanted "
                    "one cell for each"
                )
            found = vars(parse_row(schema, row, f"{where}: row {number}"))
            asked = _ASKED.get(task)
            if asked is not None and found["right"] > found[asked]:
                raise ValueError(
                    f"{where}: row {number}: right: found {found['right']}, wanted at most "
                    f"{asked} = {found[asked]}"
                )
            rows.append(row | found)
    except csv.Error as error:
        raise ValueError(f"{where}: found no CSV: {one_line(error)}") from None
    if not rows:
        raise ValueError(f"{where}: found no rows, wanted one or more")
    return rows


def read_tables(
    names: Callable[[str], list[str]], fetch: Callable[[str], str], context: int
) -> tuple[dict[str, list[Evaluated]], list[str]]:
    """The newest tables of a run's tasks, and a message for each artifact that cannot be read.

    Args:
        names: lists a folder of artifacts; both raise what the store raises.
        fetch: reads an artifact.
        context: tokens of a sequence in training.
    """
    newest: dict[tuple[str, str, str], tuple[Label, str]] = {}
    left_out: list[str] = []
    for folder in _or_left_out(names, "evaluation", left_out) or []:
        label = parse_label(folder)
        if label is None:
            continue
        path = f"evaluation/{folder}"
        files = _or_left_out(names, path, left_out) or []
        for task in TABLES:
            if f"{task}.csv" not in files:
                continue
            key = task, label.scaling, label.text
            # The newest checkpoint, and of its results the one with the longest windows.
            if key not in newest or is_newer(label, newest[key][0], context):
                newest[key] = label, f"{path}/{task}.csv"
    tables: dict[str, list[Evaluated]] = {task: [] for task in TABLES}
    for (task, _, _), (label, path) in sorted(newest.items(), key=lambda item: item[0]):
        text = _or_left_out(fetch, path, left_out)
        if text is None:
            continue
        try:
            tables[task].append(Evaluated(label, read_table(task, text, path)))
        except ValueError as error:
            left_out.append(str(error))
    return tables, left_out


def _or_left_out(read: Callable[[str], T], path: str, left_out: list[str]) -> T | None:
    """What is read of an artifact, or None and a message: one artifact ends no report."""
    try:
        return read(path)
    except Exception as error:  # Each store has errors of its own.
        left_out.append(f"{path}: {short_error(error)}")
        return None


def is_newer(label: Label, other: Label, context: int) -> bool:
    """Whether a result counts in place of another: a newer checkpoint, then longer windows."""
    return (label.step, label.context or context) > (other.step, other.context or context)
