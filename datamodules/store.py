"""The shards of a manifest: fetched, checked once per rank, memory-mapped, replaced if bad."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from torch import Tensor

from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.remote.cache import Cache, RemoteFile
from longhaul.datamodules.remote.reading import ContentError
from longhaul.datamodules.shards import Shard, ShardError, UnreadShardError, check_file, reading
from longhaul.datamodules.urls import MissingInputError, is_remote, local_path

_log = logging.getLogger(__name__)


class ShardStore:
    """Opens shards by their position in the manifest.

    A shard that is missing or differs from the manifest raises `ShardError`, or with
    `replaces_bad` is replaced by the next good shard in the manifest. The replacement depends only
    on which shards are bad, so ranks and workers agree without communication. The processes of a
    rank share the records of bad shards, which `bad_shards` returns, and of checked files.
    A failing file system, network or server raises OSError instead: other ranks may still be able
    to read the shard.

    Args:
        manifest: a loaded manifest, whose location tells where the shards are.
        cache_dir: folder for copies of remote shards; only needed for a remote manifest.
        cache_bytes: bytes that all copies in it may have; None: any number.
        replaces_bad: whether to replace a bad shard instead of raising ShardError.
        max_bad_fraction: the fraction of the shards that may be replaced; more raises ShardError.
        keep_open: number of shards mapped at a time; the one opened first is closed first.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        cache_dir: str | None,
        cache_bytes: int | None = None,
        replaces_bad: bool,
        max_bad_fraction: float,
        keep_open: int,
    ) -> None:
        self.is_remote = is_remote(manifest.location)
        """Whether the shards are fetched."""
        if self.is_remote and cache_dir is None:
            raise ValueError(
                f"data.cache_dir: found null, wanted a folder for the shards of {manifest.location}"
            )
        self.dtype = np.dtype(manifest.dtype)
        """The type in which tokens are stored."""
        self._manifest = manifest
        self._cache = None if cache_dir is None else Cache(Path(cache_dir), cache_bytes)
        self._replaces_bad = replaces_bad
        self._max_bad_fraction = max_bad_fraction
        self._keep_open = keep_open
        self._is_bad = torch.zeros(len(manifest.shards), dtype=torch.uint8)
        self._is_bad.share_memory_()
        # Inode, size and time of each file when it was hashed, and when its ids were read.
        self._hashed = torch.zeros(len(manifest.shards), 3, dtype=torch.int64).share_memory_()
        self._ids_read = torch.zeros_like(self._hashed).share_memory_()
        self._open: dict[int, Shard] = {}
        self._ahead: SimpleQueue[Sequence[int]] | None = None
        self._asked: Sequence[int] = ()

    def __getstate__(self) -> dict[str, object]:
        # A copy for a worker process leaves behind what cannot be pickled.
        return {**self.__dict__, "_open": {}, "_ahead": None, "_asked": ()}

    @property
    def bad_shards(self) -> tuple[str, ...]:
        """Names of the shards that any process of this rank has found bad and replaced so far."""
        shards = self._manifest.shards
        return tuple(shards[i].name for i in torch.nonzero(self._is_bad).flatten().tolist())

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._manifest.shards)

    def fetch_ahead(self, positions: Sequence[int]) -> None:
        """Fetch remote shards in the background, in this order, and close all others.

        A call ends the work on those of earlier calls. What cannot be fetched is no error until it
        is read.
        """
        if not self.is_remote or positions == self._asked:
            return
        self._asked = positions
        # Else the cache would keep those that are no more needed, and have no room for the next.
        self._open = {one: shard for one, shard in self._open.items() if one in positions}
        if self._ahead is None:
            self._ahead = SimpleQueue()
            Thread(target=self._fetch_asked, args=(self._ahead,), daemon=True).start()
        self._ahead.put(positions)

    def _fetch_asked(self, asked: SimpleQueue[Sequence[int]]) -> None:
        assert self._cache is not None
        while True:
            for position in asked.get():
                if not asked.empty():
                    break
                try:
                    self._cache.fetch_ahead(self._remote_file(self._manifest.shards[position]))
                # Of any library. Whoever reads the shard tries again, and tells.
                except Exception as error:
                    _log.debug("%s: not fetched ahead: %s", position, error)

    def check_present(self) -> None:
        """Raise ShardError if a local shard is missing and may not be replaced."""
        if self.is_remote or self._replaces_bad:
            return
        # One listing, because asking for each of many files takes long on a network file system.
        folder = local_path(self._manifest.location).parent
        with reading(folder):
            present = set(os.listdir(folder))
        missing = [shard.name for shard in self._manifest.shards if shard.name not in present]
        if missing:
            others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ShardError(f"shard {folder / missing[0]}: no such file{others}")

    def __getitem__(self, position: int) -> Shard:
        """The shard at `position`, or the one that replaces it."""
        shard = self._open.get(position)
        if shard is not None and not shard.is_intact:
            del self._open[position]
            shard = None
        if shard is None:
            shard = self._open_good(position)
            if len(self._open) >= self._keep_open:
                del self._open[next(iter(self._open))]
            self._open[position] = shard
        return shard

    def _open_good(self, position: int) -> Shard:
        count = len(self)
        for candidate in (*range(position, count), *range(position)):
            if self._is_bad[candidate]:
                continue
            try:
                return self._open_checked(candidate)
            except ShardError as error:
                if not self._replaces_bad:
                    raise
                self._is_bad[candidate] = 1
                _log.warning("%s: replaced by the next shard", error)
                self._stop_above_fraction(error)
        raise ShardError(f"{self._manifest.location}: all {count} shards are bad")

    def _stop_above_fraction(self, error: ShardError) -> None:
        bad, count = int(self._is_bad.sum()), len(self)
        if bad > self._max_bad_fraction * count:
            raise ShardError(
                f"{bad} of {count} shards are bad, data.max_bad_fraction allows "
                f"{self._max_bad_fraction:g} of them; the last one: {error}"
            )

    def _open_checked(self, position: int) -> Shard:
        entry = self._manifest.shards[position]
        if self.is_remote:
            with self._copy_of(self._remote_file(entry)) as path:
                return self._map(position, path, _identity(path))
        path = local_path(self._manifest.url_of(entry.name))
        identity = _identity(path)
        # A shard is opened again every epoch. It is only hashed again if its file has changed.
        if not self._hashed[position].equal(identity):
            check_file(path, entry)
            self._hashed[position] = identity
        return self._map(position, path, identity)

    def _map(self, position: int, path: Path, identity: Tensor) -> Shard:
        shard = Shard(
            path,
            self._manifest.shards[position],
            self._manifest.document_tokens,
            self.dtype,
            has_ends=self._manifest.boundaries == "ends",
            is_held=self.is_remote,
        )
        # Once a rank, since it reads the whole file.
        if not self._ids_read[position].equal(identity):
            shard.check_content(self._manifest.vocab_size)
            self._ids_read[position] = identity
        return shard

    def _remote_file(self, entry: ShardEntry) -> RemoteFile:
        return RemoteFile(self._manifest.url_of(entry.name), entry.bytes, entry.sha256)

    @contextmanager
    def _copy_of(self, file: RemoteFile) -> Iterator[Path]:
        assert self._cache is not None
        with ExitStack() as stack:
            try:
                path = stack.enter_context(self._cache.copy_of(file))
            except (ContentError, MissingInputError) as error:
                raise ShardError(f"shard {error}") from None
            except (OSError, ValueError) as error:
                text = one_line(error).removeprefix(f"{file.url}: ")
                raise UnreadShardError(f"shard {file.url}: {text}") from None
            yield path


def _identity(path: Path) -> Tensor:
    """Inode, size and time of a file, by which it is known again; shape (3,)."""
    with reading(path):
        status = path.stat()
    # Some file systems have numbers of 64 bits.
    inode = status.st_ino & ((1 << 63) - 1)
    return torch.tensor([inode, status.st_size, status.st_mtime_ns])
