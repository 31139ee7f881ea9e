"""Reads the CSV tables that tasks of `longhaul evaluate` wrote, perhaps on another machine."""

import csv
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from longhaul.datamodules.untrusted import Count, one_line, parse_row, shown

_MOST_ROWS = 4_000_000

Positive = Annotated[int, Field(ge=1, le=1 << 60)]


@dataclass(frozen=True)
class _Positions:
    position: Positive
    loss_nats: float
    mean_up_to_here: float


@dataclass(frozen=True)
class _Context:
    context: Positive
    tokens: Count
    loss_nats: float


@dataclass(frozen=True)
class _Perplexity:
    window: Positive
    stride: Positive
    perplexity: float


@dataclass(frozen=True)
class _Passkey:
    length: Positive
    prompts: Positive
    right: Count


TABLES: dict[str, Any] = {
    "positions": _Positions,
    "context": _Context,
    "perplexity": _Perplexity,
    "passkey": _Passkey,
}
"""The tasks whose tables are read, and the columns that they must have; others may follow."""


def read_table(task: str, text: str, where: str) -> list[dict[str, Any]]:
    """The rows of a task's table: the task's columns as numbers, others as text.

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
            if task == "passkey" and found["right"] > found["prompts"]:
                raise ValueError(
                    f"{where}: row {number}: right: found {found['right']}, wanted at most "
                    f"prompts = {found['prompts']}"
                )
            rows.append(row | found)
    except csv.Error as error:
        raise ValueError(f"{where}: found no CSV: {one_line(error)}") from None
    if not rows:
        raise ValueError(f"{where}: found no rows, wanted one or more")
    return rows
