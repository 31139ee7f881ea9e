"""A file whose head is a table of offsets, as MDS and LitData have, which may be compressed."""

import bz2
import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.files.untrusted import open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.compression import open_with_arrow
from longhaul.datamodules.preparation.token_files.stored import check_size

_WINDOW_BYTES = 1 << 22
# Offsets are uint32.
_MOST_BYTES = 1 << 32

_CODECS: dict[str, Callable[[Any], Any]] = {
    "br": partial(open_with_arrow, "brotli"),
    "bz2": bz2.open,
    "gz": gzip.open,
    "zstd": partial(open_with_arrow, "zstd"),
}


@dataclass(frozen=True)
class Packed:
    """A number n as `<u4`, n + 1 offsets as `<u4`, and n items from the first offset on."""

    path: Path
    codec: str | None = None
    """How the whole file is compressed."""
    size: int | None = None
    """Bytes of the content, where something else than the file says so."""
    most: int = _MOST_BYTES
    """Bytes that a compressed file may expand to, if that is less."""

    def check(self) -> None:
        """Raise ValueError unless sizes and offsets agree; a compressed file is not read."""
        if self.codec is not None and self.codec not in _CODECS:
            raise ValueError(
                f"{self.path}: found the compression {shown(self.codec)}, wanted none or "
                f"{', '.join(_CODECS)}"
            )
        if self.codec is None:
            if self.size is not None:
                check_size(self.path, self.size, "index.json")
            with open_regular(self.path) as file:
                self._offsets(file, self.path.stat().st_size)

    def items(self) -> Iterator[memoryview]:
        """The bytes of each item."""
        with _content(self) as (file, size):
            offsets = self._offsets(file, size)
            at = 0
            while at < offsets.size - 1:
                start = int(offsets[at])
                after = int(np.searchsorted(offsets, start + _WINDOW_BYTES, "right")) - 1
                after = max(at + 1, after)
                file.seek(start)
                window = memoryview(file.read(int(offsets[after]) - start))
                bounds = (offsets[at : after + 1] - start).tolist()
                for begin, end in pairwise(bounds):
                    yield window[begin:end]
                at = after

    def _offsets(self, file: Any, size: int) -> NDArray[np.int64]:
        """The offsets of items and their end, which must ascend within the file."""
        count = int.from_bytes(file.read(4), "little")
        if size < 4 + 4 * (count + 1):
            raise ValueError(
                f"{self.path}: found {size:,} bytes, wanted {4 + 4 * (count + 1):,} and more for "
                f"the offsets of {count:,} samples: a cut copy"
            )
        offsets = np.frombuffer(file.read(4 * (count + 1)), "<u4").astype(np.int64)
        falls = np.flatnonzero(np.diff(offsets) < 0)
        if falls.size:
            raise ValueError(
                f"{self.path}: found offsets that fall at sample {int(falls[0]) + 1:,}, wanted "
                "them to grow: the shard passed 4 GiB when it was written, or is damaged"
            )
        if offsets[0] < 4 + 4 * (count + 1) or offsets[-1] != size:
            raise ValueError(
                f"{self.path}: found samples in bytes {int(offsets[0]):,} to {int(offsets[-1]):,}, "
                f"wanted them to end with the file, at byte {size:,}"
            )
        return offsets


@contextmanager
def _content(packed: Packed) -> Iterator[tuple[IO[bytes], int]]:
    """The content of a file, which can be sought, and its size."""
    with open_regular(packed.path) as file:
        if packed.codec is None:
            yield file, packed.path.stat().st_size
            return
        most = min(_MOST_BYTES, packed.most if packed.size is None else packed.size)
        with foreign_content(packed.path, "damaged"), _CODECS[packed.codec](file) as stream:
            content = stream.read(most + 1)
    if len(content) > most or (packed.size is not None and len(content) != most):
        raise ValueError(
            f"{packed.path}: found {len(content):,} bytes or more after decompression, wanted "
            f"{most:,} (index.json)"
        )
    yield io.BytesIO(content), len(content)
