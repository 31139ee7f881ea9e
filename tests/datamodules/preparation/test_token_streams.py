"""How documents are found in tokens, and what is said where the user must say more."""

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from longhaul.datamodules.preparation import tokens as tokens_module
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.token_files import sources
from longhaul.datamodules.preparation.tokens import TokenFiles, open_token_files, prepare_tokens
from longhaul.datamodules.shards import Shard
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.cli import main

END = 256
TOKENIZER = build_tokenizer("bytes")


def raw(path: Path, tokens: list[int], dtype: str = "<u2", header: bytes = b"") -> Path:
    path.write_bytes(header + np.array(tokens, dtype).tobytes())
    return path


def llmc(path: Path, tokens: list[int]) -> Path:
    header = np.array([20240520, 1, len(tokens), *[0] * 253], "<i4").tobytes()
    return raw(path, tokens, header=header)


def documents_of(files: TokenFiles) -> dict[str, list[int]]:
    return {
        document.name: [token for piece in document.pieces() for token in piece.tolist()]
        for document in files.documents()
    }


def test_a_text_of_llm_c_runs_on_into_the_next_file_and_not_over_a_gap(tmp_path: Path) -> None:
    parts = [[1, 2, END, 3], [4, 5], [6, END], [END, 7, END, 8], [9, END, 1]]
    names = ["a_0.bin", "a_1.bin", "a_2.bin", "a_3.bin", "a_5.bin"]
    for name, tokens in zip(names, parts, strict=True):
        llmc(tmp_path / name, tokens)
    found = documents_of(open_token_files([tmp_path], TOKENIZER))
    assert found == {
        "a_0.bin#0": [1, 2],
        "a_0.bin#3": [3, 4, 5, 6],
        "a_3.bin#1": [7],
        "a_3.bin#3": [8],
        "a_5.bin#0": [9],
        "a_5.bin#2": [1],
    }


@pytest.mark.parametrize("seed", range(8))
def test_documents_do_not_depend_on_files_windows_and_units(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "WINDOW_TOKENS", 1 + seed % 4)
    monkeypatch.setattr(tokens_module, "UNIT_TOKENS", 1 + seed % 7)
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 6, 60)
    tokens[tokens > 3] = END
    cuts = np.sort(random.integers(0, 61, 4))
    for number, part in enumerate(np.split(tokens, cuts)):
        llmc(tmp_path / f"a_{number}.bin", part.tolist())
    found = list(documents_of(open_token_files([tmp_path], TOKENIZER)).values())
    text = "".join("|" if token == END else str(token) for token in tokens)
    assert ["".join(map(str, one)) for one in found] == [part for part in text.split("|") if part]


def test_units_of_documents_that_can_be_found_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [3, 1, 4, 2, 7, 1, 2]
    ends = np.cumsum(lengths)
    raw(tmp_path / "a.ds", [token % 9 for token in range(20)])
    raw(tmp_path / "a.ds.index", ends.tolist(), "<u8")
    whole = open_token_files([tmp_path], TOKENIZER)
    monkeypatch.setattr(tokens_module, "UNIT_TOKENS", 5)
    files = open_token_files([tmp_path], TOKENIZER)
    assert [len(list(unit.documents())) for unit in files.units] == [1, 2, 2, 2]
    assert documents_of(files) == documents_of(whole)
    assert [len(document) for document in documents_of(files).values()] == lengths


def test_bounds_and_separators_within_them_both_end_documents(tmp_path: Path) -> None:
    tokens = [END, 1, 2, END, END, 3, END, END, 4, END, 5]
    raw(tmp_path / "p.npy", tokens)
    rows = "0,4,a,s,1\n4,5,b,s,1\n5,9,c,s,1\n9,11,d,s,1\n"
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(rows.encode()))
    files = open_token_files([tmp_path], TOKENIZER, raw="uint16")
    assert documents_of(files) == {
        "p.npy#1": [1, 2],
        "p.npy#2": [],
        "p.npy#3": [3],
        "p.npy#3.2": [4],
        "p.npy#4": [5],
    }
    (manifest,) = prepare_tokens(files, tmp_path / "out", TOKENIZER, packing=Packing(9))
    assert manifest.empty_texts == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,2,a\n3,4,b\n", r"p.csv.gz:2: found '3,4', wanted start,end with start 2"),
        ("start,end\n0,4,a\n", r"p.csv.gz:1: found 'start,end'"),
        ("0,3,a\n", r"p.npy: found 4 tokens, wanted 3, the end in row 1 of p.csv.gz"),
        ("0,5,a\n", r"p.npy: found 4 tokens, wanted 5"),
        ("0,4," + "a" * 200_000, r"p.csv.gz:2: |damaged|longer"),
    ],
)
def test_a_table_that_does_not_fit_its_tokens_is_refused(
    rows: str, message: str, tmp_path: Path
) -> None:
    raw(tmp_path / "p.npy", [1, 2, END, 3])
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(rows.encode()))
    with pytest.raises(ValueError, match=message):
        open_token_files([tmp_path / "p.npy"], TOKENIZER, raw="uint16")


LONG = [72, 101, 108, 111] * 8 + [END, 33]


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (">u2", {"raw": "uint16"}, "at token 0, wanted ids below 257 of bytes; byte-swapped all "),
        ("<u2", {"raw": "uint16be"}, "all fit: big endian, --raw uint16$"),
        ("<u4", {"raw": "uint16"}, r"every second id at most 0, .* look like halves of uint32"),
        ("<u2", {"raw": "uint32"}, r"found id 6,619,208 at token 0, .*; uint16 .* fits$"),
        ("<u2", {}, r"found no --raw, wanted --raw uint16 or uint32; uint16 \(largest id 256\) fi"),
        ("<u4", {}, r"; uint32 \(largest id 256\) fits bytes"),
        ("u1", {"raw": "uint64"}, "found 34 bytes, wanted a multiple of 8"),
        ("<u2", {"raw": "uint16", "separator": "none"}, "found id 256, .* at token 32, wanted no"),
    ],
)
def test_a_wrong_type_of_raw_tokens_is_named_with_the_right_one(
    dtype: str, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    tokens = [min(token, 255) for token in LONG] if dtype == "u1" else LONG
    path = raw(tmp_path / "train.bin", tokens, dtype)
    with pytest.raises(ValueError, match=message):
        prepare_tokens(
            open_token_files([path], TOKENIZER, **options),
            tmp_path / "o",
            TOKENIZER,
            packing=Packing(65_536),
        )
    assert not (tmp_path / "o").exists()


PACKINGS = {
    "cropped": Packing(4, long="crop"),
    "dropped": Packing(4, long="drop"),
    "best-fit": Packing(4, "best-fit"),
    "best-fit, cropped": Packing(4, "best-fit", "crop"),
}


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_documents_of_own_shards_are_those_that_the_shards_know(
    tmp_path: Path, packing: Packing
) -> None:
    texts = [[1] * 6, [2], [3, 3], [4] * 5, [5], [6, 6], [7]]
    path = raw(tmp_path / "train.bin", [token for text in texts for token in (*text, END)])
    files = open_token_files([path], TOKENIZER, raw="uint16")
    (manifest,) = prepare_tokens(files, tmp_path / "own", TOKENIZER, packing=packing)
    found = [*documents_of(open_token_files([tmp_path / "own"], TOKENIZER)).values()]
    assert all(len({*document}) <= 1 for document in found)
    entry = manifest.shards[0]
    shard = Shard(tmp_path / "own" / entry.name, entry, 4, np.dtype(manifest.dtype))
    kept = [shard.tokens[start : start + 4] for start in shard.starts]
    tokens = np.concatenate(kept)
    assert sorted(np.concatenate(found)) == sorted(tokens[tokens != END])


def test_texts_of_version_1_run_on_into_the_next_block(tmp_path: Path) -> None:
    path = raw(tmp_path / "train.bin", [1, 1, 1, END, 2, 2, 2, END])
    files = open_token_files([path], TOKENIZER, raw="uint16")
    prepare_tokens(files, tmp_path / "own", TOKENIZER, packing=Packing(2), docs_per_shard=3)
    manifest = tmp_path / "own" / "manifest.json"
    content = json.loads(manifest.read_text())
    content |= {"format_version": 1, "boundaries": "none", "source": {"kind": "text"}}
    manifest.write_text(json.dumps(content))
    found = documents_of(open_token_files([tmp_path / "own"], TOKENIZER))
    assert [*found.values()] == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("items", "separator"),
    [
        ([[1, END], [2, 3, END], [4]], "after"),
        ([[END, 1], [END, 2, 3], [4]], "before"),
        ([[END, 1, END], [END, 2, END]], "both"),
        ([[1, 2], [3, 2]], "none"),
        ([[1, END, 2, 3], [4, 5, END, 6], [7, 8, 9, END]], "after"),
    ],
)
def test_the_separator_is_guessed_from_the_first_documents(
    items: list[list[int]], separator: str, tmp_path: Path
) -> None:
    ends = np.cumsum([0] + [len(item) for item in items])
    rows = "".join(f"{ends[n]},{ends[n + 1]},a\n" for n in range(len(items)))
    raw(tmp_path / "p.npy", [token for item in items for token in item])
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(rows.encode()))
    files = open_token_files([tmp_path], TOKENIZER, raw="uint16")
    assert files.found.separator == separator
    if separator == "none":
        assert files.found.reason.endswith("; 2 end with id 2, which --eos may name")
        with pytest.raises(ValueError, match=r"2 documents 0 begin .* wanted one after each text"):
            open_token_files([tmp_path], TOKENIZER, raw="uint16", separator="after")


@pytest.mark.wide
def test_long_rows_of_a_table_of_bounds_take_no_memory(tmp_path: Path) -> None:
    raw(tmp_path / "p.npy", [1] * 1000)
    rows = (f"{n},{n + 1},{'x' * 60_000}\n" for n in range(1000))
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress("".join(rows).encode(), 1))
    tracemalloc.start()
    files = open_token_files([tmp_path], TOKENIZER, raw="uint16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(documents_of(files)) == 1000
    assert peak < 10 << 20


def test_documents_without_tokens_are_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.ds").touch()
    raw(tmp_path / "a.ds.index", [0, 0], "<u8")
    files = open_token_files([tmp_path], TOKENIZER)
    assert (files.found.separator, list(documents_of(files).values())) == ("none", [[], []])


def test_a_file_without_separators_is_one_text_whose_end_is_for_validation(tmp_path: Path) -> None:
    path = raw(tmp_path / "shakespeare.bin", list(range(100)))
    files = open_token_files([path], TOKENIZER, raw="uint16")
    train, validation = prepare_tokens(
        files, tmp_path / "out", TOKENIZER, packing=Packing(10), validation_fraction=0.3
    )
    assert (train.num_tokens, validation.num_tokens) == (70, 30)


def test_the_command_prints_the_separator_and_the_manifest_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = raw(tmp_path / "train.bin", [1, 2, END, 3, END] * 100)
    command = ["prepare", "tokens", str(path), str(tmp_path / "out"), "--tokenizer", "bytes"]
    options = ["--raw", "uint16", "--doc-tokens", "10", "--validation-fraction", "0"]
    assert main([*command, *options]) == 0
    said = "separator after: of the first 500 tokens 200 have id 256"
    assert said in capsys.readouterr().out
    assert said.split(": ")[1] in (tmp_path / "out" / "train" / "manifest.json").read_text()
    assert main([*command, *options[2:]]) == 2
    assert "found no --raw" in capsys.readouterr().err


def test_several_formats_and_splits_of_a_data_set_are_refused(tmp_path: Path) -> None:
    llmc(tmp_path / "a_0.bin", [END, 1])
    raw(tmp_path / "b.bin", [1, END])
    with pytest.raises(ValueError, match=r"found llm.c and raw, wanted sources of one format"):
        open_token_files([tmp_path], TOKENIZER, raw="uint16")
    with pytest.raises(ValueError, match=r"no such file"):
        open_token_files([tmp_path / "c.bin"], TOKENIZER)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"d: found no file of tokens"):
        open_token_files([tmp_path / "d"], TOKENIZER)
    (tmp_path / "d" / "train").mkdir()
    (tmp_path / "d" / "train" / "state.json").touch()
    (tmp_path / "d" / "dataset_dict.json").touch()
    with pytest.raises(ValueError, match=r"d: found the splits train of a saved data set"):
        open_token_files([tmp_path / "d"], TOKENIZER)
