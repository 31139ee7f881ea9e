"""Valid files of tokens of other programs, and how each is read."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from mutations import mutate_bytes, mutate_json, mutate_start, mutate_table, mutate_tar
from webdataset.writer import TarWriter

from longhaul.datamodules.preparation.tokens import open_token_files
from longhaul.datamodules.tokenizer import build_tokenizer

_FOREIGN = Path(__file__).parents[1] / "datamodules" / "preparation" / "token_files"
_TOKENIZER = build_tokenizer("bytes")
_DOCUMENTS = [[72, 105, 256], [33, 256], [1, 2, 3, 256]]
_FLAT = np.array([token for document in _DOCUMENTS for token in document], "<u2")


def _copy(folder: str) -> Callable[[Path], None]:
    return lambda target: shutil.copytree(_FOREIGN / folder, target / folder, dirs_exist_ok=True)


def _read(name: str, **options: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for document in open_token_files([folder / name], _TOKENIZER, **options).documents():
            for _ in document.pieces():
                pass

    return read


def _write_streams(folder: Path) -> None:
    header = np.array([20240520, 1, _FLAT.size, *[0] * 253], "<i4").tobytes()
    (folder / "a_0.bin").write_bytes(header + _FLAT.tobytes())
    (folder / "a_1.bin").write_bytes(header + _FLAT.tobytes())


def _write_table(folder: Path) -> None:
    table = pyarrow.table({"tokens": pyarrow.array(_DOCUMENTS, pyarrow.list_(pyarrow.int32()))})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)


def _write_dolma(folder: Path) -> None:
    (folder / "a.npy").write_bytes(_FLAT.tobytes())
    (folder / "a.csv.gz").write_bytes(gzip.compress(b"0,3,a\n3,5,b\n5,9,c\n"))
    np.save(folder / "b.npy", _FLAT)


def _write_tar(folder: Path) -> None:
    with TarWriter(str(folder / "a.tar")) as writer:
        for number, document in enumerate(_DOCUMENTS):
            array = np.array(document, np.uint16)
            writer.write({"__key__": f"{number}", "tokens.npy": array})


def _mutate_packed_table(draw: Any, content: bytes) -> bytes:
    if draw.random() < 0.3:
        return mutate_bytes(draw, content)
    return gzip.compress(mutate_table(draw, gzip.decompress(content)))


# What writes the files, those of them that are mutated and how, and what reads them.
TOKEN_FORMATS: dict[str, tuple[Callable[[Path], None], dict[str, Any], Callable[[Path], None]]] = {
    "megatron": (
        _copy("megatron"),
        {f"megatron/{kind}_text_document.idx": mutate_bytes for kind in ("int", "modes")},
        _read("megatron"),
    ),
    "datatrove": (
        _copy("datatrove"),
        {"datatrove/16.ds.index": mutate_bytes, "datatrove/16.ds.metadata": mutate_bytes},
        _read("datatrove"),
    ),
    "llm.c": (_write_streams, {"a_0.bin": mutate_start}, _read("")),
    "dolma": (
        _write_dolma,
        {"a.csv.gz": _mutate_packed_table, "b.npy": mutate_bytes},
        _read("", raw="uint16"),
    ),
    "token tar": (_write_tar, {"a.tar": mutate_tar}, _read("a.tar")),
    "token tables": (
        _write_table,
        {"a.parquet": mutate_bytes, "a.arrow": mutate_bytes},
        _read(""),
    ),
    **{
        name: (
            _copy(name),
            {f"{name}/index.json": mutate_json, f"{name}/{data}": mutate_bytes},
            _read(name),
        )
        for name, data in (
            ("litdata", "chunk-0-0.bin"),
            ("litdata_leaves", "chunk-0-0.bin"),
            ("litdata_zstd", "chunk-0-0.zstd.bin"),
            ("mds", "shard.00000.mds"),
            ("mds_types", "shard.00000.mds"),
            ("mds_br", "shard.00000.mds.br"),
        )
    },
}
