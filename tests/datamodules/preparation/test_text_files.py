import bz2
import gzip
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from longhaul.datamodules.preparation import archives
from longhaul.datamodules.preparation.formats import parts_of, texts_of
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text_files import json_lines, tars

FILES = Path(__file__).parent / "texts"
TEXTS = ["one text", "zwei Texte, ü", "", "trois\r\ntextes\rà lire\n", None, "日本語 \U0001f600"]
READ = [text or "" for text in TEXTS]
ROWS = [
    {"id": number, "doc": {"lang": "x", "body": text}, "text": text}
    for number, text in enumerate(TEXTS)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(*sources: Path, key: str = "text") -> list[str]:
    texts = open_sources([str(source) for source in sources], text_key=key).texts()
    return ["".join(text.pieces()) for text in texts]


def refused(path: Path, key: str = "text") -> str:
    """The one line with which a source is refused."""
    with pytest.raises(ValueError, match=str(path)) as caught:
        read(path, key=key)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stream(rows: list[dict[str, Any]] = ROWS) -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def tar(members: dict[str, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return file.getvalue()


def arrow_file(path: Path) -> None:
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(ROWS), str(path), chunksize=2)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.arrow": lambda path: path.write_bytes(stream()),
    "a.feather": arrow_file,
    "a.tar": lambda path: path.write_bytes(
        gzip.decompress((FILES / "samples.tar.gz").read_bytes())
    ),
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pyarrow.compress(content, "zstd", asbytes=True)),
    ".lz4": lambda content: bytes(pyarrow.compress(content, "lz4", asbytes=True)),
}
COLUMNS: dict[str, Any] = {
    "string": pyarrow.string(),
    "large string": pyarrow.large_string(),
    "string view": pyarrow.string_view(),
    "binary": pyarrow.binary(),
    "large binary": pyarrow.large_binary(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "dictionary of large ones": pyarrow.dictionary(pyarrow.int8(), pyarrow.large_string()),
}
GENUINE = (
    *("frames.jsonl.zst", "skippable.zst", "frames.jsonl.lz4", "rows.parquet", "saved"),
    "samples.tar.gz",
)


@pytest.fixture(params=[*GENUINE, *WRITERS])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file, or a folder, with all texts."""
    path = tmp_path / "of" / request.param
    path.parent.mkdir()
    if (genuine := FILES / request.param).is_dir():
        shutil.copytree(genuine, path)
    elif request.param in WRITERS:
        WRITERS[request.param](path)
    else:
        shutil.copy(genuine, path)
    return path


def test_the_same_texts_are_read_from_every_format(source: Path) -> None:
    assert read(source) == READ
    assert read(source.parent) == READ
    if "tar" not in source.name:
        assert read(source, key="doc.body") == READ
        for key in ("body", "doc.title", "text.body"):
            assert f"`{key}`" in (message := refused(source, key))
            assert message.endswith("found id, doc.lang, doc.body, text; --text-key names another")
    # Names do not tell: the content does.
    if source.is_file():
        nameless = source.rename(source.parent / "nameless")
        assert read(nameless) == READ
        assert read(nameless.parent) == READ


def test_damaged_files_are_refused_in_one_line(source: Path) -> None:
    file = source if source.is_file() else source / "data-00001-of-00002.arrow"
    content = file.read_bytes()
    # What follows the end marker of a tar says nothing. Without the marker it is cut.
    end = -(-len(content.rstrip(b"\0")) // 512) * 512 if file.suffix == ".tar" else len(content) - 1
    cuts = sorted({*range(1, end, max(1, end // 12)), end - 8, end})
    for damaged in (*(content[:cut] for cut in cuts), b"\1\2\0\3" + content[4:]):
        # Whole lines are all that can be known of JSON lines.
        if damaged.endswith((b"}", b"}\n")) and file.suffix == ".jsonl":
            continue
        file.write_bytes(damaged)
        assert str(file) in refused(source)
    file.write_bytes(b"")
    if file.suffix != ".jsonl":
        refused(source)


def test_the_parts_of_a_file_have_its_texts(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_COUNTED_BYTES", 100)
    file = source if source.is_file() else source / "data-00000-of-00002.arrow"
    rows = 6 if source.is_file() else 3
    if file.suffix == ".parquet":
        table = pyarrow.parquet.read_table(file)
        pyarrow.parquet.write_table(table, file, row_group_size=2)
    whole = [(text.name, "".join(text.pieces())) for text in texts_of("a", file)]
    assert len(whole) == rows
    counts = []
    for size in (1, 150, 300, 10_000):
        parts = parts_of(file, size)
        texts = [text for part in parts for text in texts_of("a", file, part)]
        assert [(text.name, "".join(text.pieces())) for text in texts] == whole
        counts.append(len(parts))
    assert counts[-1] == 1
    # Of groups of two rows.
    expected = {".jsonl": 6, ".feather": 3, ".parquet": 3}
    if source.is_file():
        expected[".arrow"] = 3
    assert counts[0] == expected.get(file.suffix, 1)


@pytest.mark.parametrize("ending", COMPRESS)
def test_every_stream_of_a_compressed_file_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    first, second = COMPRESS[ending](LINES[:300]), COMPRESS[ending](LINES[300:])
    path.write_bytes(first + second)
    assert read(path) == READ
    if ending not in (".zst", ".lz4"):
        path.write_bytes(first + bytes(8) + second + bytes(512))
        assert read(path) == READ
    for damaged in (
        first + b"\1\2\0\3" + second[4:],
        first + second[:-3],
        first + second + b"x" * 9,
    ):
        path.write_bytes(damaged)
        assert "damaged, " in refused(path)


def test_a_window_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    for name, before in (
        ("window.jsonl.zst", b""),
        ("window.jsonl.zst", (FILES / "frames.jsonl.zst").read_bytes()),
        ("window.jsonl.xz", b""),
    ):
        path = tmp_path / name
        path.write_bytes(before + (FILES / name).read_bytes())
        assert refused(path) == (
            f"{path}: found a compression window above 128 MiB, wanted that at most; decompress "
            "the file first, with `zstd -d --long=31` or `xz -d`"
        )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "found a git-LFS pointer, wanted the file itself; `git lfs pull` fetches it",
        ),
        *(
            (
                name,
                b"\xef\xbb\xbf\n<!DOCTYPE html><html><body>404",
                "found an HTML page, wanted what",
            )
            for name in ("a.parquet", "a.arrow", "a.jsonl", "a.json.gz", "a.tar")
        ),
        ("a.parquet", b"no such thing", "not readable as parquet, found no header of such a file"),
        ("a.tar", bytes(10240), "damaged, found no header of a tar"),
        ("a.jsonl.gz", b"", "damaged, found no bytes, wanted gzip"),
    ],
)
def test_what_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match=f"^{path}: {message}"):
            read(source)


def test_a_page_and_one_object_are_texts_where_the_name_says_nothing_else(tmp_path: Path) -> None:
    for name, content in (
        ("a.html", "<html>text"),
        ("b.txt", '{"text": "one object, as in many files"}\n'),
        ("c", '{"text": "a"}\nand no other\n'),
        ("d", '{\n  "text": 1\n}\n'),
    ):
        (tmp_path / name).write_text(content)
        assert read(tmp_path / name) == [content]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'\xef\xbb\xbf{"text": "a"}', "a"),
        (b'{"text": "a", "id": ' + b"9" * 5000 + b"}", "a"),
        (b'{"text": "a", "id": NaN, "more": [1e999]}', "a"),
        (b'{"text": null}', ""),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"text": "a", "text": "b"}', "b"),
        (b'[{"text": "a"}]', "found a JSON array, wanted one object with `text` a line"),
        (b"null", "no `text`, wanted an object with a string of that name, found no key"),
        (
            b'{"text": 1, "id": {}}',
            "`text` is a number, wanted a string; found text, id; --text-key names",
        ),
        (b'{"text": 1.5}', "`text` is a number, wanted a string; found text; --text-key names"),
        (b'{"text": false}', "`text` is true or false, wanted a string; found text"),
        (b'{"text": ["a"]}', "`text` is an array, wanted a string; found text"),
        (b'{"text": {"a": "b"}}', r"`text` is an object, wanted a string; found text\.a; "),
        (
            b'{"body": 1, "id": {}}',
            "no `text`, wanted an object .*, found body, id; --text-key nam",
        ),
        (b'{"text": "\\ud83d"}', "`text`: found '.ud83d', half of a surrogate pair"),
        (b'{"text": "\xff"}', "not UTF-8, invalid start byte 0xff$"),
        (b'{"text": "a",, }', "not JSON, [^:]* at column 1[0-9]$"),
    ],
)
def test_odd_lines_of_json(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + line)
    if len(text) > 2:
        with pytest.raises(ValueError, match=f"^{path}:7: {text}"):
            read(path)
    else:
        assert read(path) == [*READ, text]


def test_a_key_with_dots_is_a_name_or_a_path(tmp_path: Path) -> None:
    rows = [{"a.b": "name", "a": {"b": "path", "c.d": "inner"}}, {"a.b": "x", "a": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.arrow").write_bytes(stream(rows))
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        assert read(tmp_path / name, key="a.b") == ["name", "x"]
        assert read(tmp_path / name, key="a.c.d") == ["inner", ""]
    with pytest.raises(
        ValueError, match=r"^--text-key: found 'a\.\.b', wanted a name, or names with"
    ):
        read(tmp_path, key="a..b")


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    column = pyarrow.array(["a"])
    table = pyarrow.Table.from_arrays([column, column, column], names=["text", "text", "other"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        message = refused(tmp_path / name)
        assert f"{name}: found 2 columns `text`, wanted one; found other; --text-key" in message
    only = pyarrow.Table.from_arrays([column, column], names=["text", "text"])
    pyarrow.parquet.write_table(only, tmp_path / "only.parquet")
    assert refused(tmp_path / "only.parquet").endswith(": found 2 columns `text`, wanted one")


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_column_of_texts_is_read_from_arrow(tmp_path: Path, kind: str) -> None:
    values: list[Any] = TEXTS
    if "b" in kind[:3] or "bytes" in kind:
        values = [value and value.encode() for value in values]
    column = pyarrow.array(values).cast(COLUMNS[kind])
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": column, "doc": pyarrow.StructArray.from_arrays([column], ["x"])})
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "a").write_bytes(sink.getvalue())
    assert read(tmp_path / "a") == read(tmp_path / "a", key="doc.x") == READ


def test_an_arrow_stream_that_ends_before_its_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    content = stream(ROWS)
    path.write_bytes(content)
    ends = [len(content) - 8]
    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        for _ in range(3):
            ends.append(file.tell())
            reader.read_next_batch()
    for end in ends:
        path.write_bytes(content[:end])
        assert refused(path).endswith(
            "found no end marker, wanted a whole Arrow stream: a cut copy"
        )
    path.write_bytes(content + content)
    assert f"found {len(content):,} bytes after the Arrow stream, wanted its end" in refused(path)


def test_offsets_of_arrow_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    content = stream([{"text": "abcdef"}, {"text": "ghi"}])
    at = content.index(b"\0\0\0\0\6\0\0\0\x09\0\0\0")
    path.write_bytes(content[: at + 4] + b"\0\0\0\x70" + content[at + 8 :])
    assert "rows 1 to 2: damaged, " in refused(path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FILES / "saved", tmp_path / "saved"))


def test_files_of_a_saved_dataset_are_read_in_its_order(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (f"data-0000{number}-of-00002.arrow" for number in (0, 1))
    shutil.copy(saved / first, saved / "cache-0123.arrow")
    assert read(saved) == READ
    assert "1 files that state.json does not list are left out: 'cache-0123.arrow'" in caplog.text
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"].reverse()
    (saved / "state.json").write_text(json.dumps(state))
    assert read(saved) == READ[3:] + READ[:3]
    opened = open_sources([str(saved.parent)])
    assert [name for name, _ in opened.files] == [f"saved/{second}", f"saved/{first}"]
    # Unless it is named.
    assert read(saved / "cache-0123.arrow") == READ[:3]


def test_the_splits_of_a_saved_dataset_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(shutil.copytree(FILES / "splits", tmp_path / "splits"))
    assert sorted(read(path)) == sorted(READ)
    assert "all splits are read, train, test; for one of them name its folder" in caplog.text
    assert read(path / "test") == READ[4:]
    shutil.rmtree(path / "test")
    with pytest.raises(
        ValueError, match=r"dataset_dict.json: lists 'test', which is not there \(1"
    ):
        read(path)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "data-00001-of-00002.arrow").unlink(),
            "lists 'data-00001-of-000",
        ),
        (lambda folder: (folder / "state.json").write_text("{"), "state.json: found no JSON"),
        (
            lambda folder: change(folder / "state.json", _data_files=[{"filename": "../a"}]),
            "state.json: _data_files.0.filename: found '../a'",
        ),
        (lambda folder: (folder / "indices.arrow").touch(), "found indices.arrow, a selection of"),
        (
            lambda folder: change(folder / "state.json", _indices_data_files=[{"filename": "i"}]),
            "found indices.arrow, a selection of rows by an old version",
        ),
        (
            lambda folder: (folder / "state.json").rename(folder / "cache-1.arrow"),
            "found 'cache-1.arrow', the cache of an intermediate step",
        ),
    ],
)
def test_a_folder_that_is_no_whole_dataset_is_refused(
    saved: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved)
    for source in (saved, saved.parent):
        with pytest.raises(ValueError, match=str(saved)) as caught:
            read(source)
        assert message in str(caught.value)


def test_other_rows_than_the_dataset_once_had_are_told(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = saved / "dataset_info.json"
    for rows, warnings in ((6, 0), (1000, 1)):
        change(info, splits={"train": {"name": "train", "num_examples": rows}})
        assert read(saved) == READ
        assert caplog.text.count("found 6 rows, dataset_info.json says 1,000") == warnings


def test_keys_and_endings_of_samples_are_those_of_webdataset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(
        tar(
            {
                "x.y/a.TXT": b"first",
                "x.y/a.cls": b"1",
                "no dot": b"",
                "b.json": b'{"text": "second", "n": {"t": "other"}}',
                "__meta__/c.txt": b"",
                "b.png": b"\0",
                f"{'long' * 40}/c.txt": "drü".encode(),
                "ü.txt": b"\xef\xbb\xbffourth",
            },
            format=tarfile.PAX_FORMAT,
        )
    )
    assert read(path) == ["first", "second", "drü", "fourth"]
    assert "sample 1 ('x.y/a'): no .json with `n.t`, found .txt, .cls" in refused(path, "n.t")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"a.txt": b"x", "b.pkl": b"x"},
            "sample 2 ('b'): no .txt and no .json with `text`, found a p",
        ),
        (
            {"a.pyd": b"x"},
            "found a pickle (.pyd), which is not read: it may run code, wanted a .txt",
        ),
        ({"a/b.py": b"x"}, "found .py, wanted a .txt or a .json a sample (webdataset)"),
        ({"folder": b"x"}, "found a tar without samples, wanted"),
        ({"a.txt": b"x", "a.TXT": b"x"}, "found 'a.TXT' twice, wanted it once a sample"),
        ({"a.txt": b"\xff"}, "sample 1 ('a'): no text in UTF-8, 'utf-8' codec"),
        ({"a.json": b"[]"}, "sample 1 ('a'): found a JSON array, wanted one object"),
        (
            {"a.json": b'{"b": 1}'},
            "sample 1 ('a'): no `text`, wanted an object with a string of that",
        ),
        ({"a.txt": b"x" * 101}, "found 'a.txt' of 101 bytes, wanted 0 MiB at most"),
        ({"a.txt": b"x", f"{'y' * 300}.txt": b"x"}, "damaged, found an extended header of 3"),
    ],
)
def test_tars_without_texts_are_refused(
    tmp_path: Path, members: dict[str, bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "MOST_TEXT_BYTES", 100)
    monkeypatch.setattr(archives, "_MOST_HEADER_BYTES", 200)
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members))
    assert message in refused(path)


def test_a_damaged_header_does_not_end_a_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    content = tar({"a.txt": b"first", "b.txt": b"second"})
    path.write_bytes(content[:1100] + b"!" + content[1101:])
    assert "damaged, bad checksum, wanted a header or the end marker" in refused(path)
    path.write_bytes(content + content)
    assert "damaged, found more after its end, wanted one archive" in refused(path)
