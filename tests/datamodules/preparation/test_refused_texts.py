"""Texts and destinations that a preparation refuses, each in one line that names them."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from prepared_texts import prepare

from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.preparation.text_files import json_lines
from longhaul.datamodules.tokenizer import build_tokenizer


def damaged_parquet(path: Path) -> bytes:
    """A file whose footer begins and ends as it should, and is noise between."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), path / "good.parquet")
    content = (path / "good.parquet").read_bytes()
    return content[:-40] + b"\xff" * 32 + content[-8:]


def write_bad(kind: str, path: Path) -> Path:
    if kind == "no column":
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path / "a.parquet")
        return path / "a.parquet"
    name, content = {
        "bad json": ("a.jsonl", b'{"text": "x"}\n{"text": \n'),
        "no text": ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n'),
        "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9]),
        "not parquet": ("a.parquet", b"PAR1 no"),
        "nested": ("a.jsonl", b"[" * 100_000),
        "no gzip": ("a.jsonl.gz", b"no gzip"),
        "long line": ("a.jsonl.gz", gzip.compress(b'{"text": "' + bytes(300_000))),
        "damaged parquet": ("a.parquet", damaged_parquet(path)),
        "binary": ("a.txt", b"a\0b"),
        "too short": ("a.txt", b"ab"),
    }[kind]
    (path / name).write_bytes(content)
    return path / name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no column", r"a.parquet: columns \['body'\], wanted a `text`, once"),
        ("bad json", r"a.jsonl:2: not JSON"),
        ("no text", r"a.jsonl:2: no `text`, wanted"),
        ("cut gzip", r"a.jsonl.gz: damaged"),
        ("not parquet", r"a.parquet: not readable as parquet"),
        ("nested", r"a.jsonl:1: not JSON that can be read, nested too deeply"),
        ("no gzip", r"a.jsonl.gz: damaged, Not a gzipped file"),
        ("long line", r"a.jsonl.gz:1: found a line of more than 0 MiB, wanted shorter texts"),
        ("damaged parquet", r"a.parquet: not readable as parquet, .*Couldn't deserialize thrift"),
        ("binary", r"a.txt: found a binary file"),
        ("too short", r"out: found 3 tokens for it, less than one block of 4; wanted a larger"),
    ],
)
def test_a_bad_source_is_named_in_one_line(
    tmp_path: Path, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MOST_TEXT_BYTES", 200_000)
    source = write_bad(kind, tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        prepare([source], tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", "", "all texts in it are empty"),
        ("a.txt", "\ufeff", "all texts in it are empty"),
        ("a.jsonl", '{"text": ""}\n{"text": null}\n', "all texts in it are empty"),
        ("a.jsonl", "", "there is no record in it"),
        ("a.parquet", [], "there is no record in it"),
        ("a.parquet", [None, None], "all texts in it are empty"),
    ],
)
@pytest.mark.parametrize("fraction", [0, 0.05])
@pytest.mark.parametrize("files", [1, 3])
def test_a_source_without_text_is_named(
    tmp_path: Path, name: str, content: str | list[None], why: str, fraction: float, files: int
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(files):
        path = folder / f"{number}{name}"
        if isinstance(content, str):
            path.write_text(content)
        else:
            column = pyarrow.array(content, pyarrow.string())
            pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    more = " and 2 more" if files > 1 else ""
    message = rf"^\d{name}{more}: found no text, wanted some: {why}$"
    with pytest.raises(ValueError, match=message):
        prepare([folder], tmp_path / "out", validation_fraction=fraction)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("texts", "options", "fraction", "message"),
    [
        ([9, 5], {"min_tokens": 99}, 0.5, "train: .* all its 2 texts are shorter than --min-toke"),
        (
            [9, 5],
            {"min_tokens": 99},
            0,
            "out: .* all its 2 texts are shorter than --min-tokens 99$",
        ),
        ([9, 5], {"max_tokens": 2}, 0, "all its 2 texts are longer than --max-tokens 2$"),
        ([9], {"max_tokens": 2}, 0, "its only text is longer than --max-tokens 2$"),
        ([99, 0, 3], {"long": "drop", "min_tokens": 4}, 0, "1 is shorter .* 4, 1 is longer than"),
        ([99, 0, 3], {"long": "drop", "min_tokens": 4}, 0, r"block of 8 \(.*drop\), 1 is empty$"),
        (
            [60, 0],
            {"min_tokens": 20},
            0.1,
            "validation: .* of its 2 texts 1 is shorter than --min-tokens 20, 1 is empty; "
            "--validation-fraction 0 prepares without it$",
        ),
        (
            [6],
            {},
            0.05,
            r"validation: .*: of the texts none falls to it \(--validation-fraction\); "
            "--validation-fraction 0 prepares without it$",
        ),
        ([20], {}, 0.05, r"out/validation: found 2 tokens for it, less than one block of 8; want"),
    ],
)
def test_a_part_that_options_leave_without_text_says_which(
    tmp_path: Path, texts: list[int], options: dict, fraction: float, message: str
) -> None:
    for number, length in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    files = open_sources([str(path) for path in sorted(tmp_path.iterdir())])
    tokenizer, packing = build_tokenizer("bytes"), Packing(8, **options)
    with pytest.raises(ValueError, match=message):
        prepare_text(
            files, tmp_path / "out", tokenizer, packing=packing, validation_fraction=fraction
        )
    assert not (tmp_path / "out").exists()


def test_a_text_that_a_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    import tokenizers

    model = tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="gone")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "b.txt").write_text("xyz")
    with pytest.raises(ValueError, match=r"^b.txt: .*/tokenizer.json: cannot encode text, "):
        prepare([tmp_path / "b.txt"], tmp_path / "out", str(tmp_path))


@pytest.mark.parametrize("lines", [1, 300])
def test_the_first_bad_record_is_named_and_nothing_is_left(tmp_path: Path, lines: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"txt": 1}\n' * lines)
    # Only a few lines are for validation, which is written first.
    with pytest.raises(ValueError, match=r"a.jsonl:1: no `text`, wanted an object"):
        prepare([source], tmp_path / "out", validation_fraction=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_destination_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some text")
    for options in ({}, {"validation_fraction": 0.5}):
        with pytest.raises(ValueError, match=r"other files .a.txt., wanted a new or an empty"):
            prepare([source], tmp_path, **options)
    with pytest.raises(ValueError, match=r"a.txt: found a file, wanted a folder"):
        prepare([source], source)
    prepare([source], tmp_path / "out")
    with pytest.raises(ValueError, match="with --doc-tokens 4, this one has 2; wanted another"):
        prepare([source], tmp_path / "out", block_tokens=2)
    source.write_text("some other text")
    with pytest.raises(ValueError, match=r"with files of SRC \(files_sha256\) '"):
        prepare([source], tmp_path / "out")
