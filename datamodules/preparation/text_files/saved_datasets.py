"""Folders that the `datasets` library writes: which of their files hold the rows, in which order.

`save_to_disk` of a Dataset writes Arrow streams and a state.json that lists them. That of a
DatasetDict writes such a folder for each split and a dataset_dict.json that lists them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from longhaul.datamodules.files.untrusted import (
    Count,
    PlainName,
    parse_json,
    read_regular,
    shown,
)
from longhaul.datamodules.preparation.text_files.tables import arrow_rows

_STATE, _INFO = "state.json", "dataset_info.json"
SPLITS = "dataset_dict.json"
"""What a folder of splits has, each of which is a folder."""

_SELECTION = "indices.arrow"
_INTERMEDIATE = "cache-*.arrow"
_MOST_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _DataFile:
    filename: PlainName


@dataclass(frozen=True)
class _State:
    files: Annotated[list[_DataFile], Field(alias="_data_files")]
    split: Annotated[str | None, Field(alias="_split")] = None
    indices: Annotated[list[Any] | None, Field(alias="_indices_data_files")] = None
    """Of versions before 1.2.1: the rows are those of the files that these files number."""


@dataclass(frozen=True)
class _Split:
    num_examples: Count


@dataclass(frozen=True)
class _Info:
    splits: dict[str, _Split] | None = None


@dataclass(frozen=True)
class _Splits:
    splits: list[PlainName]


def is_saved(names: Sequence[str]) -> bool:
    """Whether a folder with these names is one dataset, whose files have an order."""
    return _STATE in names and _INFO in names


def names_to_read(folder: Path, names: Sequence[str]) -> Sequence[str]:
    """Of the names in a folder, those that hold texts if `datasets` wrote it, in its order.

    Of other folders, all names.

    Raises:
        ValueError: files that it lists are not there, or it has files whose rows are others than
            those of the dataset.
    """
    if is_saved(names):
        return _data_files(folder, names)
    if SPLITS in names:
        return _splits(folder, names)
    if intermediate := [name for name in names if fnmatchcase(name, _INTERMEDIATE)]:
        raise ValueError(
            f"{folder}: found {shown(intermediate[0])}, the cache of an intermediate step of "
            "datasets, wanted a folder that save_to_disk wrote, or the names of the files to read"
        )
    return names


def _data_files(folder: Path, names: Sequence[str]) -> list[str]:
    where = folder / _STATE
    state = parse_json(_State, read_regular(where, _MOST_BYTES), where)
    if state.indices or _SELECTION in names:
        raise ValueError(
            f"{folder}: found {_SELECTION}, a selection of rows by an old version of datasets, "
            "wanted the rows themselves; load it and save it again with a current version"
        )
    files = [each.filename for each in state.files]
    _check_there(where, files, names)
    if unlisted := [name for name in names if name.endswith(".arrow") and name not in files]:
        _log.warning(
            "%s: %d files that %s does not list are left out: %s",
            *(folder, len(unlisted), _STATE, shown(unlisted[0])),
        )
    _compare_rows(folder, state.split, files)
    return files


def _splits(folder: Path, names: Sequence[str]) -> list[str]:
    where = folder / SPLITS
    splits = parse_json(_Splits, read_regular(where, _MOST_BYTES), where).splits
    _check_there(where, splits, names)
    if len(splits) > 1:
        _log.warning(
            "%s: all splits are read, %s; for one of them name its folder",
            *(folder, ", ".join(splits)),
        )
    return splits


def _check_there(where: Path, listed: Sequence[str], names: Sequence[str]) -> None:
    if missing := [name for name in listed if name not in names]:
        raise ValueError(
            f"{where}: lists {shown(missing[0])}, which is not there ({len(missing)} of "
            f"{len(listed)} are not), wanted a whole copy"
        )


def _compare_rows(folder: Path, split: str | None, files: Sequence[str]) -> None:
    """Read the files to their ends, and warn if they have other rows than the split once had.

    That number is the one of when the split was loaded, and stays when rows are filtered.
    """
    where = folder / _INFO
    splits = parse_json(_Info, read_regular(where, _MOST_BYTES), where).splits or {}
    only = next(iter(splits), "") if len(splits) == 1 else ""
    wanted = splits.get(split or only)
    if wanted is None:
        return
    found = sum(arrow_rows(folder / name) for name in files)
    if found != wanted.num_examples:
        _log.warning(
            "%s: found %s rows, %s says %s: right if rows were filtered or selected",
            *(folder, f"{found:,}", _INFO, f"{wanted.num_examples:,}"),
        )
