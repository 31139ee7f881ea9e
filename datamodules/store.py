"""The shards of a manifest: fetched, checked once per rank, memory-mapped, replaced if bad."""

import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.shards import Shard, ShardError, UnreadShardError, check_file, reading
from longhaul.datamodules.urls import fetch, is_remote, local_path

_log = logging.getLogger(__name__)


class ShardStore:
    """Opens shards by their position in the manifest.

    A shard that is missing or differs from the manifest raises `ShardError`, or with
    `replaces_bad` is replaced by the next good shard in the manifest. The replacement depends only
    on which shards are bad, so ranks and workers agree without communication. The processes of a
    rank share the records of bad shards, which `bad_shards` returns, and of checked files.
    A failing file system raises OSError instead: other ranks may still be able to read the shard.

    Args:
        manifest: a loaded manifest, whose location tells where the shards are.
        cache_dir: folder for copies of remote shards; only needed for a remote manifest.
        replaces_bad: whether to replace a bad shard instead of raising ShardError.
        max_bad_fraction: the fraction of the shards that may be replaced; more raises ShardError.
        keep_open: number of shards mapped at a time; the one opened first is closed first.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        cache_dir: str | None,
        replaces_bad: bool,
        max_bad_fraction: float,
        keep_open: int,
    ) -> None:
        if is_remote(manifest.location) and cache_dir is None:
            raise ValueError(
                f"data.cache_dir: found null, wanted a folder for the shards of {manifest.location}"
            )
        self.dtype = np.dtype(manifest.dtype)
        """The type in which tokens are stored."""
        self._manifest = manifest
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._replaces_bad = replaces_bad
        self._max_bad_fraction = max_bad_fraction
        self._keep_open = keep_open
        self._is_bad = torch.zeros(len(manifest.shards), dtype=torch.uint8)
        self._is_bad.share_memory_()
        # Inode, size and time of each file when it was hashed, and when its ids were read.
        self._hashed = torch.zeros(len(manifest.shards), 3, dtype=torch.int64).share_memory_()
        self._ids_read = torch.zeros_like(self._hashed).share_memory_()
        self._open: dict[int, Shard] = {}

    def __getstate__(self) -> dict[str, object]:
        # A copy for a worker process leaves memory maps behind, which cannot be pickled.
        return {**self.__dict__, "_open": {}}

    @property
    def bad_shards(self) -> tuple[str, ...]:
        """Names of the shards that any process of this rank has found bad and replaced so far."""
        shards = self._manifest.shards
        return tuple(shards[i].name for i in torch.nonzero(self._is_bad).flatten().tolist())

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._manifest.shards)

    def check_present(self) -> None:
        """Raise ShardError if a local shard is missing and may not be replaced."""
        if is_remote(self._manifest.location) or self._replaces_bad:
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
        path = self._local_copy(position, entry)
        identity = self._check(position, path, entry)
        shard = Shard(
            path,
            entry,
            self._manifest.document_tokens,
            self.dtype,
            has_ends=self._manifest.boundaries == "ends",
        )
        # As often as the file is hashed, which reads all of it too and takes much longer.
        if not self._ids_read[position].equal(identity):
            shard.check_content(self._manifest.vocab_size)
            self._ids_read[position] = identity
        return shard

    def _check(self, position: int, path: Path, entry: ShardEntry) -> Tensor:
        """Hash a file unless a process of this rank has. Returns what it is known by."""
        with reading(path):
            status = path.stat()
        # A shard is opened again every epoch. It is only hashed again if its file has changed.
        # Some file systems have numbers of 64 bits.
        inode = status.st_ino & ((1 << 63) - 1)
        identity = torch.tensor([inode, status.st_size, status.st_mtime_ns])  # (3,)
        if not self._hashed[position].equal(identity):
            check_file(path, entry)
            self._hashed[position] = identity
        return identity

    def _is_intact(self, position: int, path: Path, entry: ShardEntry) -> bool:
        try:
            self._check(position, path, entry)
        except (ShardError, UnreadShardError):
            return False
        return True

    def _local_copy(self, position: int, entry: ShardEntry) -> Path:
        url = self._manifest.url_of(entry.name)
        if not is_remote(url):
            return local_path(url)
        assert self._cache_dir is not None
        try:
            return fetch(
                url, self._cache_dir, is_intact=lambda path: self._is_intact(position, path, entry)
            )
        except OSError as error:
            raise ShardError(f"shard {error}") from None
