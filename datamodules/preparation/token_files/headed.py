"""Streams with a header: llm.c's and modded-nanogpt's .bin, and lit-gpt's packed data sets.

Their texts run on into the next file: neighbours whose names differ in a number are one stream.
"""

import re
import struct
from pathlib import Path

import numpy as np

from longhaul.datamodules.preparation.token_files.sources import Stream
from longhaul.datamodules.preparation.token_files.stored import Stored, check_size

LITGPT_MAGIC = b"LITPKDS"
_GPT2_MAGIC, _LLAMA3_MAGIC, _EVALUATION_MAGIC = 20240520, 20240801, 20240522
_MAGICS = (_GPT2_MAGIC, _LLAMA3_MAGIC, _EVALUATION_MAGIC)
_VERSIONS = {_GPT2_MAGIC: (1, "<u2"), _LLAMA3_MAGIC: (7, "<u4")}
_LLMC_HEADER = 1024
_LITGPT_HEADER = 24
_LITGPT_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def is_llmc(head: bytes) -> bool:
    """Whether a file with these first bytes is one of llm.c's, in either byte order."""
    return len(head) >= 4 and any(
        head[:4] == struct.pack(order + "i", magic) for order in "<>" for magic in _MAGICS
    )


def open_llmc(name: str, path: Path) -> Stream:
    """A file of llm.c's. ValueError where it is damaged, or holds an evaluation."""
    with path.open("rb") as file:
        head = file.read(12).ljust(12, b"\0")
    magic, version, count = struct.unpack("<3i", head)
    if magic == _EVALUATION_MAGIC:
        raise ValueError(f"{path}: found an evaluation file of llm.c, wanted a training file")
    if magic not in _VERSIONS:
        raise ValueError(f"{path}: found llm.c's header in big endian, wanted little endian")
    wanted, dtype = _VERSIONS[magic]
    if version != wanted:
        raise ValueError(
            f"{path}: found version {version} of magic {magic}, wanted version {wanted}"
        )
    if count < 0:
        raise ValueError(f"{path}: found {count:,} tokens in its header, wanted 0 and more")
    return _stream(name, path, np.dtype(dtype), count, _LLMC_HEADER)


def open_litgpt(name: str, path: Path) -> Stream:
    """A file of lit-gpt's PackedDataset. ValueError where it is damaged."""
    with path.open("rb") as file:
        head = file.read(_LITGPT_HEADER).ljust(_LITGPT_HEADER, b"\0")
    version, code, count = struct.unpack_from("<QBQ", head, len(LITGPT_MAGIC))
    if version != 1 or code not in _LITGPT_TYPES:
        raise ValueError(
            f"{path}: found version {version} and dtype code {code}, wanted version 1 and 1 to 5 "
            "or 8, which are whole numbers"
        )
    return _stream(name, path, np.dtype(_LITGPT_TYPES[code]), count, _LITGPT_HEADER)


def _stream(name: str, path: Path, dtype: np.dtype, count: int, header: int) -> Stream:
    why = f"its header counts {count:,} tokens of {dtype.name}"
    check_size(path, header + count * dtype.itemsize, why)
    stored = (Stored(path, dtype, count, header),)
    last = re.search(r"\d+(?=\D*$)", path.name)
    if last is None:
        return Stream(name, stored)
    group = path.parent / f"{path.name[: last.start()]}*{path.name[last.end() :]}"
    return Stream(name, stored, str(group), int(last[0]))
