"""Reads the CSV tables that tasks of `longhaul evaluate` wrote, perhaps on another machine."""

import csv
import math
from dataclasses import dataclass
from typing import Any, Literal

from longhaul.datamodules.untrusted import Count, Positive, one_line, parse_row, shown

_MOST_ROWS = 4_000_000

_Bos = Literal["yes", "no", "unknown"]
"""Whether the beginning-of-sequence id is in front; earlier tables do not say."""


@dataclass(frozen=True)
class _Positions:
    position: Positive
    loss_nats: float
    mean_up_to_here: float
    standard_error: float = math.nan
    standard_error_up_to_here: float = math.nan


@dataclass(frozen=True)
class _Bins:
    first: Positive
    last: Positive
    loss_nats: float
    standard_error: float


@dataclass(frozen=True)
class _Context:
    context: Positive
    tokens: Count
    loss_nats: float
    standard_error: float = math.nan


@dataclass(frozen=True)
class _Perplexity:
    window: Positive
    stride: Positive
    perplexity: float
    tokens: Count = 0
    standard_error: float = math.nan
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
    chance: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class _Attention:
    layer: Count
    matrix: Count
    largest: float
    first_token_share: float
    kurtosis: float
    half_life: float
    rotation: float


@dataclass(frozen=True)
class _Scores:
    layer: Positive
    key: Positive
    score: float
    least_of_heads: float
    most_of_heads: float
    largest: float
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
