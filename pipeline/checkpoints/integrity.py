"""Finds damage in a checkpoint: its files are compared with the checksums written beside them.

`checksums.json` is written last and holds the size and sha256 of every other file.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field

from longhaul.datamodules.files.atomic import flush, write_atomically
from longhaul.datamodules.files.untrusted import (
    Count,
    Sha256,
    check_regular,
    parse_json,
    read_regular,
    sha256_of,
)
from longhaul.pipeline.checkpoints.shards import Shard, Shards, merge, shards_of
from longhaul.pipeline.checkpoints.tensor_header import read_header
from longhaul.pipeline.checkpoints.together import ask_first_rank, gather_on_first, place_in

FORMAT = 3
CHECKSUMS = "checksums.json"
STATE = "state.json"
_TENSOR_FILE = re.compile(r"([a-z]+)-(\d{5,})-\d{3,}\.safetensors")
# Room for the files of 10,000 ranks.
MOST_CHECKSUMS_BYTES = 4 << 20


class CheckpointError(OSError):
    """A checkpoint that could not be written or read; the message is one line for the user."""


@dataclass(frozen=True)
class _Format:
    """What checksums.json has in every version."""

    format: Count


@dataclass(frozen=True)
class _Checksum:
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class _Checksums:
    """The file checksums.json."""

    files: dict[Annotated[str, Field(max_length=200)], _Checksum]

    def __post_init__(self) -> None:
        if STATE not in self.files:
            raise ValueError(f"files: found no {STATE}, wanted its checksum")
        for name in self.files:
            if name != STATE and not _TENSOR_FILE.fullmatch(name):
                raise ValueError(f"files: found {name!r}, wanted {STATE} or a file of tensors")


@dataclass(frozen=True)
class Contents:
    """What a checkpoint's files hold."""

    files: list[str]
    """Their names."""
    tensors: dict[str, Shards]
    """All tensors of the files that were verified; a shard has the position of its file."""


# A rank's first damage, with the file's number, and the shards in each of its files.
_Found = tuple[tuple[int, str] | None, list[dict[str, Shard]]]


def write_state_and_checksums(
    folder: Path, state: Mapping[str, Any], tensor_files: Mapping[str, Any]
) -> None:
    """Write state.json, then the checksums of it and of the tensor files."""
    files = {STATE: _write_json(folder / STATE, state), **tensor_files}
    _write_json(folder / CHECKSUMS, {"format": FORMAT, "files": files})
    flush(folder)


def verify(
    path: Path,
    only: Collection[str] | None = None,
    rank_group: dist.ProcessGroup | None = None,
) -> Contents:
    """Compare a checkpoint's files with its checksums, and return what these files hold.

    Args:
        path: a checkpoint folder.
        only: hash only these groups of tensors, and state.json. None hashes all files.
        rank_group: process group of the ranks that all call this, each of which reads a share of
            the files. None for one process, which reads all.

    Raises:
        CheckpointError: on all ranks, naming the first file that is missing or damaged, or a tensor
            whose shards do not fit together.
    """
    checksums = ask_first_rank(rank_group, partial(_checksums_of, path, only))
    share = _share(checksums, *place_in(rank_group))
    damage: tuple[int, str] | None = None
    shards: list[dict[str, Shard]] = []
    for number, (name, expected) in enumerate(checksums.items()):
        try:
            if name in share:
                _verify_file(path / name, expected)
                if _TENSOR_FILE.fullmatch(name):
                    shards.append(shards_of(number, read_header(path / name)))
        except (OSError, ValueError) as error:
            damage = number, f"{name}: {reason(error)}"
            break
    of_ranks = gather_on_first(rank_group, (damage, shards))
    # Only the first rank calls it, which has what all have found.
    return ask_first_rank(rank_group, partial(_contents, path, list(checksums), of_ranks))


def _contents(path: Path, files: list[str], of_ranks: Sequence[_Found]) -> Contents:
    """What all ranks have found together. CheckpointError if one has found damage."""
    if found := [damage for damage, _ in of_ranks if damage is not None]:
        raise CheckpointError(f"checkpoint {path} is damaged: {min(found)[1]}")
    try:
        return Contents(files, merge(one for _, shards in of_ranks for one in shards))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _checksums_of(path: Path, only: Collection[str] | None) -> dict[str, _Checksum]:
    """The checksums of a checkpoint's files: of these groups of tensors, or of all."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is not a folder")
    checksums = _read_checksums(path)
    if only is None:
        return checksums
    if missing := set(only) - {_group(name) for name in checksums}:
        raise CheckpointError(f"checkpoint {path} has no {', '.join(sorted(missing))}")
    wanted = {*only, None}
    return {name: entry for name, entry in checksums.items() if _group(name) in wanted}


def _share(checksums: Mapping[str, _Checksum], rank: int, count: int) -> set[str]:
    """The files that one of `count` ranks hashes: as many bytes as any other, up to one file.

    On as many ranks as wrote the checkpoint, each hashes its own files. It reads them next, from
    the page cache.
    """
    total = sum(entry.bytes for entry in checksums.values())
    share, before = set(), 0
    for name in sorted(checksums, key=_writer):
        size = checksums[name].bytes
        # The part of all bytes in which the file's middle lies; an empty file may lie at their end.
        if min((2 * before + size) * count // max(1, 2 * total), count - 1) == rank:
            share.add(name)
        before += size
    return share


def _read_checksums(path: Path) -> dict[str, _Checksum]:
    where = path / CHECKSUMS
    try:
        content = read_regular(where, MOST_CHECKSUMS_BYTES)
        version = parse_json(_Format, content, CHECKSUMS).format
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: no {CHECKSUMS}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {reason(error)}") from error
    if version != FORMAT:
        # A ValueError, unlike the rest: such a checkpoint is intact and must not be set aside.
        raise ValueError(f"checkpoint {path} has format {version}, this version reads {FORMAT}")
    try:
        return parse_json(_Checksums, content, CHECKSUMS).files
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _verify_file(path: Path, expected: _Checksum) -> None:
    """Raise unless this is a regular file with the expected size and hash."""
    check_regular(path)
    size = path.stat().st_size
    if size != expected.bytes:  # a longer file is not hashed
        raise ValueError(f"found {size:,} bytes, {CHECKSUMS} says {expected.bytes:,}")
    sha256 = sha256_of(path)
    if sha256 != expected.sha256:
        raise ValueError(f"found sha256 {sha256}, {CHECKSUMS} says {expected.sha256}")


def checksum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def reason(error: BaseException) -> str:
    """An error's message, without the errno and the path of an OSError."""
    return getattr(error, "strerror", None) or str(error)


def first_cause(error: BaseException) -> str:
    """The message of the lowest failed rank, for an error in which torch collects all ranks'."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        where = f"rank {rank}: " if len(failures) > 1 or rank else ""
        return where + reason(cause)
    return reason(error)


def _group(name: str) -> str | None:
    """The group of tensors that a file holds, None for state.json."""
    match = _TENSOR_FILE.fullmatch(name)
    return match[1] if match else None


def _writer(name: str) -> int:
    """The rank that wrote a file."""
    match = _TENSOR_FILE.fullmatch(name)
    return int(match[2]) if match else 0


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write a file, read it back to compare, and return its checksum."""
    content = json.dumps(value, indent=1).encode()
    write_atomically(path, content)
    if path.read_bytes() != content:
        raise CheckpointError(f"{path.name} does not read back as it was written")
    return checksum(path)
