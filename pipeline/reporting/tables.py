"""Reads the CSV tables that tasks of `longhaul evaluate` wrote, perhaps on another machine."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from longhaul.datamodules.files.untrusted import one_line, parse_row, shown
from longhaul.pipeline.evaluation.labels import Label, parse_label
from longhaul.pipeline.evaluation.registry import task_tables
from longhaul.pipeline.tracking.mlflow_limits import short_error

T = TypeVar("T")

_MOST_ROWS = 4_000_000


@dataclass(frozen=True)
class Evaluated:
    """The table that one task wrote."""

    label: Label
    rows: list[dict[str, Any]]


TABLES = task_tables()
"""The tables of tasks that are read, by their names without .csv."""


def read_table(task: str, text: str, where: str) -> list[dict[str, Any]]:
    """The rows of a table: its columns as its schema has them, others as text.

    Raises:
        ValueError: the table has something else; the row and the column are named.
    """
    rows: list[dict[str, Any]] = []
    table = TABLES[task]
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
            found = vars(parse_row(table.row, row, f"{where}: row {number}"))
            if table.most is not None:
                counted, most = table.most
                if found[counted] > found[most]:
                    raise ValueError(
                        f"{where}: row {number}: {counted}: found {found[counted]}, wanted at most "
                        f"{most} = {found[most]}"
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
