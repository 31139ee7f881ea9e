"""Counts equal documents by their hashes, in memory that does not grow with their number."""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
# So many bytes of digests are held, and then go into files. All of a file are compared at a time:
# 10^8 documents need 1.6 GB of disk and, at the end, 25 MB of memory.
_HELD_BYTES = 16 << 20
_FILES = 64


class Digests:
    """The digests of documents, of which it counts those that came before."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, digest: bytes) -> None:
        """Count one more document; its digest has DIGEST_BYTES bytes."""
        self._held += digest
        if len(self._held) >= _HELD_BYTES:
            self._put_away()

    def repeated(self) -> int:
        """How many documents have the digest of an earlier one."""
        if self._folder is None:
            return _repeated(_as_numbers(self._held))
        self._put_away()
        files = sorted(Path(self._folder.name).iterdir())
        return sum(_repeated(_as_numbers(file.read_bytes())) for file in files)

    def _put_away(self) -> None:
        """Append what is held to files, by its first bits, so that equal ones are in one file."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="longhaul-digests-")
        digests = np.frombuffer(bytes(self._held), np.uint8).reshape(-1, DIGEST_BYTES)
        which = digests[:, 0] % _FILES
        for number in np.unique(which):
            with Path(self._folder.name, f"{number:02d}").open("ab") as file:
                file.write(digests[which == number].tobytes())
        self._held.clear()


def _as_numbers(digests: bytes | bytearray) -> NDArray[np.uint64]:
    return np.frombuffer(bytes(digests), np.uint64).reshape(-1, 2)


def _repeated(numbers: NDArray[np.uint64]) -> int:
    ordered = numbers[np.lexsort((numbers[:, 1], numbers[:, 0]))]
    return int((ordered[1:] == ordered[:-1]).all(axis=1).sum())
