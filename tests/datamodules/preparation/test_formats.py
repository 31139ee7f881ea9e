import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from longhaul.datamodules.preparation.formats import content_of
from longhaul.datamodules.preparation.source_files import open_sources

TEXTS = ["one text", "zwei Texte, ü", "", "trois\r\ntextes\rà lire\n"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def with_arrow(codec: str) -> Callable[[bytes], bytes]:
    def compress(content: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return bytes(sink.getvalue())

    return compress


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": with_arrow("zstd"),
    ".lz4": with_arrow("lz4"),
}


def read(*sources: Path) -> list[str]:
    texts = open_sources([str(source) for source in sources]).texts()
    return ["".join(text.pieces()) for text in texts]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.json"])
def test_json_lines_are_read_however_they_are_compressed(
    tmp_path: Path, name: str, ending: str
) -> None:
    content = COMPRESS.get(ending, bytes)(LINES)
    assert read(written(tmp_path / f"{name}{ending}", content)) == TEXTS
    # A mark at the beginning, and line ends of Windows.
    windows = b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n")
    content = COMPRESS.get(ending, bytes)(windows)
    assert read(written(tmp_path / f"{name}{ending}", content)) == TEXTS


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_text_is_told_by_its_first_bytes(tmp_path: Path, ending: str) -> None:
    content = COMPRESS[ending]("a text, \u00fc\r\n".encode())
    for name in (f"a.txt{ending}", "without an ending"):
        path = written(tmp_path / name, content)
        assert read(path) == ["a text, \u00fc\r\n"]
    # In a folder too, where it is no binary file.
    assert len(read(tmp_path)) == 2


def test_bytes_that_are_no_utf8_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(7):
        written(tmp_path / f"{number}.txt", "für".encode("latin-1"))
    assert read(tmp_path) == ["f\ufffdr"] * 7
    assert caplog.text.count("found bytes that are not UTF-8; U+FFFD stands") == 5
    assert caplog.text.count("more files have such bytes") == 1


@pytest.mark.parametrize("ending", COMPRESS)
def test_damaged_compressed_files_are_named(tmp_path: Path, ending: str) -> None:
    content = COMPRESS[ending](LINES * 50)
    for damaged in (content[:-9], content[:20], b"no such thing"):
        path = written(tmp_path / f"a.jsonl{ending}", damaged)
        with pytest.raises(ValueError, match=f"^{path}: damaged, ") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    path = written(tmp_path / f"a.txt{ending}", COMPRESS[ending](content))
    with pytest.raises(ValueError, match=f"^{path}: found .* in .*, wanted one of them"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK\3\4", "found .zip, whose texts cannot be read, wanted plain text, JSON"),
        ("a", b"PK\3\4", "found .zip, whose texts cannot be read, wanted plain text, JSON"),
        ("a.orc", b"ORC", "found .orc, whose texts cannot be read"),
        (
            "a.json",
            b'[{"text": "x"}]',
            "found a JSON array, wanted an object on each line; to read",
        ),
        ("a.json.gz", gzip.compress(b"[1]", mtime=0), "found a JSON array, wanted an object"),
        ("a.json", b'{\n "text": "x"\n}\n', "found an object over several lines, wanted"),
        ("a.json", b"3", "found no object, wanted"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "found JSON lines in UTF-16, wanted UTF-8"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1", mtime=0),
            "found parquet in gzip, wanted .parquet itself",
        ),
        ("a.bin", b"\0\1", "found a binary file, wanted plain text, JSON lines"),
    ],
)
def test_files_of_other_formats_are_refused_or_left_out_of_a_folder(
    tmp_path: Path, name: str, content: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / name, content)
    (tmp_path / "b.txt").write_text("good")
    assert read(tmp_path) == ["good"]
    (warning,) = caplog.messages
    assert warning.startswith("1 files whose texts cannot be read are left out: '")
    assert warning.endswith(f"/{name}'")
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"body": "x"}\n', "1: no `text`, wanted an object"),
        ("a.txt", b"\xff\xfea", "damaged, .utf-16-le. codec can't decode"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\\ud800c"}\n', "2: `text`: found '.ud800', half"),
        ("a.jsonl", b'{"text": "a\xed\xa0\x80"}\n', "1: `text`: found '.ud800', half of a"),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_what_is_damaged_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str, is_named: bool
) -> None:
    path = written(tmp_path / name, content)
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(ValueError, match=f"^{path}:( )?{message}"):
        read(path if is_named else tmp_path)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, encoding: str) -> None:
    text = "naïve \u65e5\r\nline"
    mark = "\ufeff" if encoding[-3:] in ("-le", "-be") else ""
    path = written(tmp_path / "a.txt", (mark + text).encode(encoding))
    assert read(path) == [text]
    assert read(tmp_path) == [text]
    # Nor is it one in records.
    line = json.dumps({"text": f"\ufeff{text}"})
    assert read(written(tmp_path / "b.jsonl", line.encode())) == [text]


COLUMNS: dict[str, Any] = {
    "string": pyarrow.string(),
    "large string": pyarrow.large_string(),
    "string view": pyarrow.string_view(),
    "binary": pyarrow.binary(),
    "large binary": pyarrow.large_binary(),
    "binary view": pyarrow.binary_view(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "dictionary of bytes": pyarrow.dictionary(pyarrow.int8(), pyarrow.binary()),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_column_of_texts_is_read(tmp_path: Path, kind: str) -> None:
    values: list[Any] = [*TEXTS, None, TEXTS[1]]
    if "b" in kind[:3] or "bytes" in kind:
        values = [value and value.encode() for value in values]
    table = pyarrow.table({"text": pyarrow.array(values).cast(COLUMNS[kind])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == [*TEXTS, "", TEXTS[1]]
    # Without the ending, the first bytes tell.
    (tmp_path / "a.parquet").rename(tmp_path / "a")
    assert content_of(tmp_path / "a").kind == "parquet"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([[1]]), "column `text` is list<element: int64>, wanted strings or bytes of"),
        (pyarrow.array([1.5]), "column `text` is double, wanted strings or bytes"),
        (pyarrow.array([{"a": "x"}]), "column `text` is struct<a: string>, wanted"),
        (pyarrow.array([b"ok", b"\xed\xa0\x80"]), "row 2: no text in UTF-8, 'utf-8' codec can't"),
        (
            pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string()),
            "row 2: no text in UTF-8, 'utf-8' codec can't",
        ),
    ],
)
def test_other_columns_are_refused_by_type_or_row(
    tmp_path: Path, column: Any, message: str
) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read(path)
