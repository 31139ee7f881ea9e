"""What a task's file says of the tables that it writes, and of how `longhaul report` shows them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field

XAxis = Literal["context", "tokens", "position", "bytes"]
YAxis = Literal["loss", "perplexity", "from zero", "share", "score", "log"]

Rows: TypeAlias = Sequence[Mapping[str, Any]]
"""A table: in each row the values of its columns by name."""

Band: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Lower and upper bounds."""

MOST_LOSS = 1e6
"""Nats per token beyond which a loss is taken for an error; a uniform guess has 18 at most."""

MOST = 1e30
"""Of scores and weights: sums and ratios of them are finite, and can be drawn."""


def number(
    low: float, high: float, *, or_nan: bool = False, or_inf: bool = False
) -> AfterValidator:
    """A check that a number of a table can be averaged and drawn."""

    def check(value: float) -> float:
        if low <= value <= high or (or_nan and math.isnan(value)) or (or_inf and value == math.inf):
            return value
        raise ValueError(f"found {value:g}, wanted {low:g} to {high:g}")

    return AfterValidator(check)


Loss = Annotated[float, number(0, MOST_LOSS)]
"""Nats per token."""

LossError = Annotated[float, number(0, MOST_LOSS, or_nan=True)]
"""A standard error in nats; NaN where there was one window."""

Share = Annotated[float, number(0, 1)]
Magnitude = Annotated[float, number(0, MOST)]
Count = Annotated[int, Field(ge=0, le=1 << 50)]
Positive = Annotated[int, Field(ge=1, le=1 << 50)]
"""Numbers of tokens, layers and answers. A float holds each of them exactly, also sums of a few."""

Bos = Literal["yes", "no"]
BOS_COLUMN = {"bos": "beginning-of-sequence id in front"}
"""The column of that type, and its name in captions."""


class Curve(NamedTuple):
    """A run's columns by their names in the CSV; the first is x in the figure, the last is y."""

    columns: Mapping[str, Sequence[Any]]
    band: Band | None = None

    @property
    def x(self) -> Sequence[float]:
        return next(iter(self.columns.values()))

    @property
    def y(self) -> Sequence[float]:
        return list(self.columns.values())[-1]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with a curve for each run."""

    name: str
    """Prefix of its file names."""

    curve: Callable[[Rows], Curve]
    """Makes the curve of one run's table. Without x, the figure is left out."""

    caption: Callable[[Sequence[Rows]], str]
    """What a reader must know to understand it, from the tables of all runs: whole sentences."""

    x_label: str
    y_label: str
    title: str = ""
    """By default that of the table."""

    x_axis: XAxis = "context"
    y_axis: YAxis = "loss"
    """Losses, and perplexities by their logarithms, are averaged and compared in nats; gaps of all
    but scores are drawn too. See `reporting.drawing.Figure`."""

    has_ticks: bool = True
    """Whether the horizontal axis has a number at each point."""

    is_over_tokens: bool = True
    """Whether x is in tokens. The training context is then marked."""

    reference: Callable[[Sequence[Rows]], tuple[str, float]] | None = None
    """Gives label and value of a horizontal line. Losses have the bigram model's."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A table on the page with a row for each run."""

    title: str
    caption: Callable[[Sequence[Rows]], str]
    columns: Sequence[str]
    """With units. The first columns name the run."""

    rows: Callable[[Sequence[Rows]], list[list[float]]]
    """Makes the values of these columns for each of the runs' tables."""


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """A CSV file that a task writes."""

    name: str
    """The file's, without .csv; unlike that of any other task's table."""

    row: type
    """A dataclass of the columns that it must have; others may follow."""

    title: str
    measured_by: str
    """The arguments of `longhaul evaluate` that make it, as a reader without it is told."""

    most: tuple[str, str] | None = None
    """A column of counts, and the one that each of them must not exceed."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Columns of options, and what captions call them: results with others are not averaged."""

    charts: Sequence[Chart] = ()
    is_of_one_scaling: bool = False
    """Whether results under each scaling of positions have charts of their own."""

    summary: Summary | None = None


def columns(rows: Rows, *names: str) -> dict[str, list[Any]]:
    """These columns of a table."""
    return {name: [row[name] for row in rows] for name in names}


def band(y: Sequence[float], errors: Sequence[float]) -> Band | None:
    """The lower and upper bounds of y; None where there are no errors, as of one window."""
    if not all(map(math.isfinite, errors)):
        return None
    pairs = list(zip(y, errors, strict=True))
    return [value - error for value, error in pairs], [value + error for value, error in pairs]


def column_values(tables: Sequence[Rows], column: str) -> str:
    """All values of a column of whole numbers or words, as text: numbers first."""
    values = {row[column] for rows in tables for row in rows}
    numbers = sorted(value for value in values if isinstance(value, int))
    words = sorted(value for value in values if isinstance(value, str))
    return ", ".join([*(f"{number:,}" for number in numbers), *words])


def options_in_words(tables: Sequence[Rows], options: Mapping[str, str]) -> str:
    """Options that results depend on and that their label does not have."""
    return "; ".join(f"{name}: {column_values(tables, column)}" for column, name in options.items())
