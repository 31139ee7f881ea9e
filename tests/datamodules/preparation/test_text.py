"""From files of text to shards: every format, the ends of texts, splits, and what is stopped."""

import gzip
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared_texts import prepare

from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation import formats
from longhaul.datamodules.preparation import text as text_preparation
from longhaul.datamodules.preparation.formats import Text
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import STANDARD_LIBRARY, open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.shards import Shard
from longhaul.datamodules.tokenizer import build_tokenizer

EOT = 256


def tokens_of(manifest: Manifest) -> list[int]:
    tokens: list[int] = []
    for entry in manifest.shards:
        path = Path(manifest.url_of(entry.name))
        shard = Shard(path, entry, manifest.document_tokens, np.dtype(manifest.dtype))
        for start in shard.starts:
            tokens += shard.tokens[start : start + manifest.document_tokens].tolist()
    return tokens


def texts_of(manifest: Manifest) -> list[str]:
    """The texts that end inside the documents of the shards."""
    content = tokens_of(manifest)
    texts, start = [], 0
    for place, token in enumerate(content):
        if token == EOT:
            texts.append(bytes(content[start:place]).decode())
            start = place + 1
    return texts


def test_texts_are_joined_and_cut_into_blocks(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n\n" for t in ("abcdef", "", "xé", "12")))
    manifest = prepare([source], tmp_path / "out")
    # The empty text is not there, and no end of it.
    whole = [*b"abcdef", EOT, *"xé".encode(), EOT, *b"12", EOT]
    assert tokens_of(manifest) == whole[:12]
    assert (manifest.num_blocks, manifest.dropped_tokens) == (3, 2)
    assert manifest.empty_texts == 1
    assert (manifest.bos_id, manifest.eot_id, manifest.vocab_size) == (256, 256, 257)


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 7, 12, 13])
def test_shards_hold_the_ends_of_the_texts(tmp_path: Path, block_tokens: int) -> None:
    source = tmp_path / "a.jsonl"
    texts = ("abcdef", "", "xé", "12", "a", "long enough for two blocks")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = prepare([source], tmp_path / "out", block_tokens=block_tokens)
    assert manifest.boundaries == "ends"
    found: list[int] = []
    before = 0
    for entry in manifest.shards:
        path = Path(manifest.url_of(entry.name))
        shard = Shard(path, entry, block_tokens, np.dtype("uint16"), has_ends=True)
        for ends in shard.ends:
            found += [before + int(end) for end in ends]
            before += block_tokens
    tokens = tokens_of(manifest)
    after_eot = {place + 1 for place, token in enumerate(tokens) if token == EOT}
    assert found == sorted(after_eot | set(range(block_tokens, len(tokens) + 1, block_tokens)))


def test_every_file_format_gives_its_texts(tmp_path: Path) -> None:
    texts = [f"text {n}: ünïcode\r\nnext line " + "x" * n for n in range(30)]
    lines = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    table = pyarrow.table({"id": list(range(30)), "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    for suffix in ("jsonl", "jsonl.gz", "parquet"):
        manifest = prepare([tmp_path / f"a.{suffix}"], tmp_path / f"out-{suffix}", block_tokens=1)
        assert texts_of(manifest) == texts
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.txt").write_text(text, newline="")
    manifest = prepare([tmp_path / "folder"], tmp_path / "out-folder", block_tokens=1)
    assert sorted(texts_of(manifest)) == sorted(texts)


def test_files_in_folders_that_are_not_text_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "__pycache__").mkdir(parents=True)
    (source / ".git").mkdir()
    for name, content in (
        ("a.txt", b"good"),
        ("b.bin", b"\0\1\2"),
        (".hidden", b"no"),
        ("__pycache__/c.txt", b"no"),
        (".git/d.txt", b"no"),
        ("latin.txt", b"caf\xe9"),
    ):
        (source / name).write_bytes(content)
    manifest = prepare([source], tmp_path / "out", block_tokens=1)
    assert sorted(texts_of(manifest)) == ["caf\N{REPLACEMENT CHARACTER}", "good"]


def test_a_file_is_read_once_however_many_links_lead_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "z.txt").write_text("the file")
    for name in ("a.txt", "b.txt"):
        (source / name).symlink_to("z.txt")
    (tmp_path / "elsewhere.txt").write_text("another")
    for name in ("d.txt", "c.txt"):
        (source / name).symlink_to(tmp_path / "elsewhere.txt")
    opened = open_sources([str(source), str(source / "z.txt")])
    assert sorted(name for name, _ in opened.files) == ["c.txt", "z.txt"]
    assert "4 files are named more than once, or by links, and read once" in caplog.text


def test_what_is_no_regular_file_is_left_out_and_never_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a text")
    os.mkfifo(source / "fifo")
    os.mknod(source / "socket", stat.S_IFSOCK | 0o600)
    (source / "nowhere").symlink_to("nothing")
    (source / "endless").symlink_to("/dev/zero")
    opened = open_sources([str(source)])
    assert [name for name, _ in opened.files] == ["a.txt"]
    assert "4 links to nothing, FIFOs, sockets and devices are left out" in caplog.text
    for name, found in (("fifo", "a FIFO"), ("socket", "a socket"), ("endless", "a device")):
        with pytest.raises(ValueError, match=f"{name}: found {found}, wanted a regular file"):
            open_sources([str(source / name)])


def test_a_validation_split_is_by_file_and_reproducible(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"{number}.txt").write_text(f"file {number}")
    splits = []
    for attempt in ("one", "two"):
        manifests = prepare_text(
            open_sources([str(source)]),
            tmp_path / attempt,
            build_tokenizer("bytes"),
            packing=Packing(1),
            validation_fraction=0.2,
        )
        splits.append([texts_of(manifest) for manifest in manifests])
    assert splits[0] == splits[1]
    train, validation = splits[0]
    assert sorted(train + validation) == sorted(f"file {n}" for n in range(200))
    characters = [sum(map(len, part)) for part in (validation, train)]
    assert abs(characters[0] / sum(characters) - 0.2) < 0.005
    # The files are in a mixed order.
    numbers = [int(text.split()[1]) for text in train]
    assert numbers != sorted(numbers)


@pytest.mark.wide
def test_the_standard_library_is_a_corpus() -> None:
    opened = open_sources([STANDARD_LIBRARY])
    names = [name for name, _ in opened.files]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    root = Path(sysconfig.get_path("stdlib"))
    assert all(path == root / name for name, path in opened.files)


def test_a_long_text_is_read_in_pieces_that_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(
        f"def f{n}(x):\n    return {n}  * x\n\n\n# {'word ' * (n % 7)}\n" for n in range(400)
    )
    (tmp_path / "a.txt").write_text(text)
    expected = build_tokenizer("gpt2").encode(text).tolist()
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 512)
    (piece, *_) = pieces = list(next(open_sources([str(tmp_path / "a.txt")]).texts()).pieces())
    assert len(pieces) > 20
    assert len(piece) <= 1024
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", "gpt2", block_tokens=16)
    assert manifest.num_tokens + manifest.dropped_tokens == len(expected) + 1
    assert tokens_of(manifest) == expected[: manifest.num_tokens]


def test_a_run_of_white_space_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 14)
    (tmp_path / "a.txt").write_text("aaaaaaaa bb  c and")
    pieces = next(open_sources([str(tmp_path / "a.txt")]).texts()).pieces()
    assert list(pieces) == ["aaaaaaaa", " bb  c and"]


def test_a_text_without_a_place_to_cut_is_reassembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 10)
    text = "é" * 35 + "\n\n\n" + " " * 30
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert texts_of(prepare([tmp_path / "a.jsonl"], tmp_path / "out", block_tokens=1)) == [text]


def test_the_part_for_training_is_not_read_beyond_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    reads: list[int] = []

    def pieces() -> Iterator[str]:
        for number in range(10):
            reads.append(number)
            yield "abcdefgh"

    monkeypatch.setattr(
        text_preparation,
        "texts_of",
        lambda name, path, part, key: [Text("a.txt", pieces, is_file=True)],
    )
    prepare([tmp_path / "a.txt"], tmp_path / "out", validation_fraction=0.5)
    # To count its characters, once for each part; for training; for validation.
    assert reads == [*range(10), *range(5), *range(10), *range(10)]


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    ("packing", "validation_fraction"),
    [
        (Packing(32), 0.3),
        (Packing(32, "best-fit"), 0.3),
        (Packing(32, "best-fit", "crop", min_tokens=6), 0.0),
    ],
    ids=str,
)
def test_stopped_preparations_end_with_the_same_files(
    tmp_path: Path,
    packing: Packing,
    validation_fraction: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_preparation, "UNIT_BYTES", 500)
    monkeypatch.setattr("longhaul.datamodules.preparation.packing.WINDOW_TOKENS", 300)
    lines = [json.dumps({"text": "word " * (n % 23)}) for n in range(60)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.txt").write_text("some plain text, longer than a shard\n" * 20)
    opened = open_sources([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])

    def run(destination: Path, stop_after: int | None) -> None:
        calls = 0

        def progress(tokens: int) -> None:
            nonlocal calls
            calls += 1
            if calls == stop_after:
                raise StopError

        prepare_text(
            opened,
            destination,
            build_tokenizer("bytes"),
            packing=packing,
            docs_per_shard=4,
            validation_fraction=validation_fraction,
            tokenized=progress,
            packed=progress,
        )

    def files(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    run(tmp_path / "whole", None)
    expected = files(tmp_path / "whole")
    assert len(expected) > 10
    # Stop after every few documents, and restart until one preparation finishes.
    destination = tmp_path / "stopped"
    for _ in range(200):
        kept = {p: p.stat().st_mtime_ns for p in destination.rglob("*.tar")}
        try:
            run(destination, 9)
        except StopError:
            assert {p: p.stat().st_mtime_ns for p in kept} == kept
        else:
            break
    assert files(destination) == expected


def test_a_tokenizer_file_is_copied_next_to_its_shards(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {chr(code): code for code in range(32, 127)}
    vocabulary |= {f"<{n}>": n for n in (*range(32), *range(127, 70_000))}
    vocabulary["</s>"] = vocabulary.pop("<3>")
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("abcdefgh")
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", str(tmp_path / "own.json"))
    (tmp_path / "own.json").unlink()
    assert (manifest.tokenizer, manifest.dtype, manifest.eot_id) == ("tokenizer.json", "uint32", 3)
    assert tokens_of(manifest) == [*b"abcdefgh"]
    assert Corpus(manifest).load_tokenizer().encode("ab").tolist() == [97, 98]
    beside = tmp_path / "out" / "tokenizer.json"
    beside.write_text(beside.read_text().replace('"a"', '"ä"'))
    with pytest.raises(
        ValueError, match=r"manifest.json: tokenizer_sha256 is .*, but tokenizer.json"
    ):
        Corpus(manifest).load_tokenizer()


def test_what_another_version_began_is_not_continued(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some words\n" * 20)

    def stop(tokens: int) -> None:
        if tokens > 100:
            raise StopError

    with pytest.raises(StopError):
        prepare([source], tmp_path / "out", packed=stop)
    progress = tmp_path / "out" / ".progress.jsonl"
    first, *rest = progress.read_text().splitlines(keepends=True)
    progress.write_text(
        "".join([json.dumps({"source": json.loads(first)["source"]}) + "\n", *rest])
    )
    with pytest.raises(ValueError, match="out: another version of longhaul has begun this"):
        prepare([source], tmp_path / "out")


def test_the_ids_of_given_tokens_are_those_of_the_shards(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {chr(code): code for code in range(128)} | {"<end>": 128, "<begin>": 129}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"a<end>{n}"}) + "\n" for n in range(8)))
    built = build_tokenizer(str(tmp_path), bos="<begin>", eos="<end>")
    (manifest,) = prepare_text(
        open_sources([str(source)]), tmp_path / "out", built, packing=Packing(4)
    )
    assert (manifest.bos_id, manifest.eot_id) == (129, 128)
    tokens = [t for n in range(8) for t in (*f"a<end>{n}".encode(), 128)]
    assert tokens_of(manifest) == tokens[: manifest.num_tokens]
    # The copy beside the shards is read without the names.
    assert Corpus(manifest).load_tokenizer().encode("<end>").tolist() == list(b"<end>")
