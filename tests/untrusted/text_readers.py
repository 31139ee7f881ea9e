"""Valid files of texts of every format, and how they are read."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet

from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.tokenizer import build_tokenizer


def write_texts(folder: Path) -> None:
    lines = "".join(json.dumps({"id": n, "text": f"text {n} é"}) + "\n" for n in range(20))
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    (folder / "a.txt.xz").write_bytes(lzma.compress(lines.encode()))
    with pyarrow.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    (folder / "a.txt").write_text("some text")
    table = pyarrow.table({"id": list(range(20)), "text": [f"text {n}" for n in range(20)]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    pyarrow.feather.write_feather(table, str(folder / "a.feather"), chunksize=8)
    (folder / "saved").mkdir()
    write_stream(folder / "saved" / "data.arrow", table)
    (folder / "saved" / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], "_split": "train"})
    )
    (folder / "saved" / "dataset_info.json").write_text(
        json.dumps({"splits": {"train": {"num_examples": 20}}})
    )
    write_stream(folder / "a.arrow", table.set_column(1, "text", table["text"].dictionary_encode()))
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("a.txt", b"some text"), (f"{'b' * 150}.json", b'{"text": "x"}')):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def write_stream(path: Path, table: pyarrow.Table) -> None:
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=8)


def read_texts(folder: Path) -> None:
    for text in open_sources([str(folder)]).texts():
        for piece in text.pieces():
            build_tokenizer("bytes").encode(piece)
