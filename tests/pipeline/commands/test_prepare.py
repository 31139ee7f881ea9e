import argparse
import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numcodecs
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import zarr

from longhaul.datamodules.preparation import text, tokenizing
from longhaul.pipeline.cli import main
from longhaul.pipeline.commands import prepare
from longhaul.pipeline.terminal import progress

ROWS, COLUMNS = 200, 128
SHARDS = 13


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "train.zarr"
    array = zarr.create_array(
        store=str(path),
        shape=(ROWS, COLUMNS),
        chunks=(32, 64),
        dtype="<u2",
        zarr_format=2,
        fill_value=0,
        compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
    )
    array[:] = np.random.default_rng(0).integers(0, 50_257, (ROWS, COLUMNS))
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "some.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(500):
            file.write(json.dumps({"text": f"record {number} " * (number % 17)}) + "\n")
    return path


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.main(parser.parse_args([str(word) for word in words]))


def killed_at(tokens: int, *words: object) -> int:
    """Run the command in a process that is killed when it has packed this many tokens."""
    script = f"""
        import argparse, os, signal, sys
        from longhaul.pipeline.commands import prepare
        from longhaul.pipeline.terminal.progress import TokenProgress

        def show(self, done):
            if done >= {tokens} and not self._what.startswith("tokenized"):
                os.kill(os.getpid(), signal.SIGKILL)

        TokenProgress.show = show
        parser = argparse.ArgumentParser()
        prepare.add_arguments(parser)
        prepare.main(parser.parse_args(sys.argv[1:]))
    """
    line = [sys.executable, "-P", "-c", textwrap.dedent(script), *map(str, words)]
    return subprocess.run(line, check=False, timeout=100).returncode


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["longcrawl64", "text"])
def test_a_killed_preparation_goes_on_where_it_was(
    kind: str, store: Path, records: Path, tmp_path: Path
) -> None:
    options = {
        "longcrawl64": [store, "--docs-per-shard", 16],
        "text": [
            *(records, "--docs-per-shard", 16, "--doc-tokens", COLUMNS),
            *("--validation-fraction", 0),
        ],
    }[kind]
    below = "train" if kind == "text" else ""

    def words(folder: Path) -> list[object]:
        return [kind, options[0], folder, *options[1:]]

    assert command(*words(tmp_path / "whole")) == 0
    expected = contents(tmp_path / "whole" / below)
    destination = tmp_path / "killed"
    folder = destination / below
    # In the first shard, in the middle, and again at once: the second start reports what is there.
    finished: dict[Path, tuple[int, int]] = {}
    for documents, shards in ((7, 0), (100, 6), (101, 6)):
        assert killed_at(documents * COLUMNS, *words(destination)) == -9
        now = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("*.tar")}
        assert len(now) == shards
        assert finished.items() <= now.items()
        assert not (folder / "manifest.json").exists()
        finished = now
    assert command(*words(destination)) == 0
    now = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("*.tar")}
    assert finished.items() <= now.items()
    assert contents(folder) == expected


def test_a_finished_preparation_is_left_as_it_is(store: Path, tmp_path: Path, capsys) -> None:
    words = ("longcrawl64", store, tmp_path / "out", "--docs-per-shard", 16)
    assert command(*words) == 0
    first = capsys.readouterr().out
    assert first == (
        f"{tmp_path}/out/manifest.json: {ROWS * COLUMNS:,} tokens, {ROWS} blocks, {SHARDS} shards\n"
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert command(*words) == 0
    assert capsys.readouterr().out == first.replace(".json: ", ".json: was there already, ")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "train-000003.tar").unlink()
    with pytest.raises(ValueError, match=r"train-000003.tar: missing or short"):
        command(*words)


def test_no_corpus_is_chosen_that_was_not_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        ValueError, match=rf"found one path, '{out}', .* `longhaul prepare text stdlib {out}` for"
    ):
        command("text", out)
    assert not out.exists()
    source = tmp_path / "pages.parquet"
    source.touch()
    for words in (("text", source), ("tokens", source, "--tokenizer", "gpt2")):
        example = f"such as `longhaul prepare {words[0]} {source} data/NAME`$"
        with pytest.raises(ValueError, match=f"found one path, '{source}', .*{example}"):
            command(*words)


def test_the_standard_library_is_split_in_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "stdlib").mkdir()
    monkeypatch.chdir(tmp_path)
    library = tmp_path / "lib"
    library.mkdir()
    for number in range(100):
        (library / f"module_{number}.py").write_text(f"x = {number}\n" * 20)
    (library / "notes.txt").write_text("not Python")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    assert command("text", "stdlib", tmp_path / "out", "--doc-tokens", 32) == 0
    assert "stdlib is read as Python's standard library, not as what has this" in caplog.text
    assert "validation: 0.048 of the tokens, whole texts" in capsys.readouterr().out
    manifests = [
        json.loads((tmp_path / "out" / split / "manifest.json").read_text())
        for split in ("train", "validation")
    ]
    tokens = [
        32 * sum(shard["documents"] for shard in manifest["shards"]) + manifest["dropped_tokens"]
        for manifest in manifests
    ]
    total = sum(path.stat().st_size + 1 for path in library.glob("*.py"))
    assert sum(tokens) == total
    assert 0.045 * total < tokens[1] < 0.055 * total
    assert [manifest["tokenizer"] for manifest in manifests] == ["bytes", "bytes"]


def test_the_folder_to_write_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    for _ in range(2):
        assert command("text", ".", "data/out", "--doc-tokens", 16) == 0
    assert capsys.readouterr().out.count("was there already") == 2


def test_progress_tells_tokens_per_second(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert command("longcrawl64", store, tmp_path / "out") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == ROWS
    assert lines[-1].startswith(f"{ROWS * COLUMNS:,} of {ROWS * COLUMNS:,} tokens, ")
    assert lines[-1].endswith(" tokens/s")


def test_the_time_before_the_first_tokens_counts_for_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    seconds = iter((0.0, 1.0, 31.0, 32.0, 35.0, 36.0, 42.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    shown = progress.TokenProgress(None, "packed")
    for done in (0, 64, 1064, 4064, 5064, 9064):
        shown.show(done)
    assert capsys.readouterr().err.splitlines() == [
        "packed: 64 tokens",
        "packed: 5,064 tokens, 1,000 tokens/s",
        "packed: 9,064 tokens, 818 tokens/s",
    ]


def test_refusing_a_source_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import argparse, sys; from longhaul.pipeline.commands import prepare;"
        "parser = argparse.ArgumentParser(); prepare.add_arguments(parser);"
        "args = parser.parse_args(sys.argv[1:])\n"
        "try: prepare.main(args)\n"
        "except OSError as error: print(error)\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'lightning', 'pyarrow')))"
    )
    line = [sys.executable, "-P", "-c", script, "longcrawl64", "nowhere.zarr", str(tmp_path / "o")]
    done = subprocess.run(line, check=False, timeout=60, capture_output=True, text=True)
    assert done.stdout == "nowhere.zarr: no such folder, wanted a Zarr v2 store\n"
    assert done.returncode == 0


def test_a_full_disk_is_one_line_and_loses_nothing(store: Path, tmp_path: Path) -> None:
    options = ("--docs-per-shard", 16)
    command("longcrawl64", store, tmp_path / "whole", *options)
    largest = max(len(content) for content in contents(tmp_path / "whole").values())
    # A limit on a file's size stands in for a full disk: the write fails in the same place.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 4096, hard))
    try:
        with pytest.raises(OSError, match=r"train-000000.tar'$") as caught:
            command("longcrawl64", store, tmp_path / "out", *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*train*"))
    command("longcrawl64", store, tmp_path / "out", *options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def tokens_of(folder: Path) -> int:
    """Tokens in the documents of a folder of shards, and those dropped."""
    manifest = json.loads((folder / "manifest.json").read_text())
    documents = sum(shard["documents"] for shard in manifest["shards"])
    return documents * int(manifest["document_tokens"]) + int(manifest["dropped_tokens"])


def test_one_file_has_a_part_for_validation(tmp_path: Path, capsys) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {number}\n" for number in range(5000)))
    out = tmp_path / "out"
    assert command("text", text, out, "--doc-tokens", 64) == 0
    size = text.stat().st_size
    assert tokens_of(out / "validation") == round(size * 0.05) + 1
    assert tokens_of(out / "train") == size - round(size * 0.05) + 1
    printed = capsys.readouterr().out
    assert "validation: 0.05 of the tokens, the end of each file (--validation-fraction" in printed
    assert (
        command("text", text, tmp_path / "all", "--doc-tokens", 64, "--validation-fraction", 0) == 0
    )
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["train"]
    assert "no validation part, as --validation-fraction is 0" in capsys.readouterr().out


def test_of_records_whole_texts_are_for_validation(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("text", records, tmp_path / "out", "--doc-tokens", 64) == 0
    train, manifest = (
        json.loads((tmp_path / "out" / name / "manifest.json").read_text())
        for name in ("train", "validation")
    )
    counts = [sum(shard["documents"] for shard in one["shards"]) for one in (train, manifest)]
    share = f"{counts[1] / sum(counts):.2g}"
    assert share != "0.05"
    assert (
        f"validation: {share} of the tokens, whole texts (--validation-fraction 0.05)\n"
        "that is not 0.05: texts differ in length, and are not divided\n"
    ) in (printed := capsys.readouterr().out)
    assert "empty texts skipped" in printed
    assert "validation_from" not in manifest["source"]


@pytest.mark.parametrize(("fraction", "size"), [(0.05, 512), (0.99, 64)])
def test_a_part_that_is_too_small_does_not_refuse_the_remedy(
    fraction: float, size: int, tmp_path: Path
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("some words\n" * 1000)
    options = ("--validation-fraction", fraction)
    with pytest.raises(
        ValueError,
        match=rf"wanted a larger source or shorter blocks \(--doc-tokens {size}, --val",
    ):
        command("text", text, tmp_path / "out", "--doc-tokens", 1024, *options)
    assert not (tmp_path / "out").exists()
    assert command("text", text, tmp_path / "out", "--doc-tokens", size, *options) == 0


def test_of_another_preparation_nothing_is_removed(records: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too short")
    options = ("--doc-tokens", 64, "--validation-fraction", 0)
    assert command("text", records, tmp_path / "out", *options) == 0
    before = contents(tmp_path / "out" / "train")
    for source, option, difference in (
        (records, ("--doc-tokens", 32), "--doc-tokens 64, this one has 32"),
        (records, ("--packing", "best-fit"), "--packing 'concat', this one has 'best-fit'"),
        (records, ("--long", "drop"), "--long 'split', this one has 'drop'"),
        (records, ("--max-tokens", 9), "--max-tokens None, this one has 9"),
        (records, ("--text-key", "body"), "--text-key 'text', this one has 'body'"),
        (records, ("--tokenizer", "gpt2"), r"--tokenizer \(tokenizer_sha256\) '.*', this one has"),
        (records, ("--docs-per-shard", 1), "--docs-per-shard 256, this one has 1"),
        (tmp_path, (), r"files of SRC in number 1, this one has 2; wanted another folder"),
        (tmp_path / "a.txt", (), r"files of SRC \(files_sha256\) '[0-9a-f.]*', this one has '"),
    ):
        (tmp_path / "b.txt").write_text("another")
        with pytest.raises(ValueError, match=f"out/train: holds a preparation with {difference}"):
            command("text", source, tmp_path / "out", *options, *option)
    assert not (tmp_path / "out" / ".units").exists()
    assert contents(tmp_path / "out" / "train") == before


def test_missing_sources_are_bad_input_and_an_unwritable_folder_a_failure(
    tmp_path: Path, capsys
) -> None:
    for words in (["text", "nowhere", "out"], ["longcrawl64", "nowhere", "out"]):
        assert main(["prepare", *words]) == 2
        assert capsys.readouterr().err.startswith("longhaul: nowhere: no such ")
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    (tmp_path / "file").write_text("")
    words = ["text", str(tmp_path / "a.txt"), str(tmp_path / "file" / "out"), "--doc-tokens", "8"]
    assert main(["prepare", *words]) == 1
    assert capsys.readouterr().err == f"longhaul: {tmp_path}/file/out/.units: Not a directory\n"


def test_a_terminal_without_columns_gets_lines(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_end, terminal = os.openpty()  # it has no columns unless somebody sets them
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert command("longcrawl64", store, tmp_path / "out") == 0
        stream.flush()
        shown = os.read(main_end, 1 << 16).decode()
    os.close(main_end)
    assert " of 25,600 tokens, " in shown
    assert "\r\n" in shown
    assert "%|" not in shown


def whole_folder(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_mixed(folder: Path, count: int) -> Path:
    """A folder of texts of up to 800 words in files of every kind."""
    folder.mkdir()
    draw = random.Random(0)
    words = [f"word{number}" for number in range(5000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(0, 800))) for _ in range(count)]
    lines = [json.dumps({"text": one}) + "\n" for one in texts]
    (folder / "a.jsonl").write_text("".join(lines[::2]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[1::6]))
    table = pyarrow.table({"text": texts[3::6]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=10)
    for number, one in enumerate(texts[5::6]):
        (folder / f"{number}.txt").write_text(one)
    return folder


PACKED = ("--doc-tokens", "2048", "--docs-per-shard", "20", "--packing", "best-fit")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_workers_and_parts_change_no_byte(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "UNIT_BYTES", 10_000)
    large, options = write_mixed(tmp_path / "source", 60), PACKED
    assert command("text", large, tmp_path / "one", *options, "--workers", 1) == 0
    expected = whole_folder(tmp_path / "one")
    folder = tmp_path / "three"
    for part in ("1/3", "0/3"):
        assert command("text", large, folder, *options, "--part", part, "--workers", 1) == 0
    assert not (folder / "train").exists()
    kept = {path: path.stat().st_ino for path in (folder / ".units").glob("*.unit")}
    assert len(kept) > 8
    # The last part leaves alone what is there.
    assert command("text", large, folder, *options, "--part", "2/3", "--workers", workers) == 0
    assert (
        kept.items()
        <= {path: path.stat().st_ino for path in (folder / ".units").glob("*.unit")}.items()
    )
    assert command("text", large, folder, *options, "--workers", 1) == 0
    assert whole_folder(folder) == expected


@pytest.mark.wide
def test_the_first_bad_text_is_named_whatever_worker_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "UNIT_BYTES", 1000)
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"text {number}"}) for number in range(3000)]
    good = "\n".join(lines)
    # Both are in units that are begun at once; that of the second is read sooner.
    lines[30], lines[45] = "{bad}", "[bad]"
    source.write_text("\n".join(lines))
    options = ("--doc-tokens", 64, "--workers", 2)
    with pytest.raises(ValueError, match=rf"^{source}:31: not JSON") as caught:
        command("text", source, tmp_path / "out", *options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "train").exists()
    source.write_text(good)
    assert command("text", source, tmp_path / "out", *options) == 0


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 4])
def test_a_hundred_kills_change_no_byte(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes and workers are forked from this one, so that kills meet work and not imports."""
    large = write_mixed(tmp_path / "source", 500)
    monkeypatch.setattr(text, "UNIT_BYTES", 30_000)
    monkeypatch.setattr(tokenizing, "get_context", lambda _: get_context("fork"))
    options = (*PACKED, "--workers", workers)

    def begun(destination: Path) -> psutil.Process:
        if child := os.fork():
            return psutil.Process(child)
        try:
            os._exit(command("text", large, destination, *options))
        finally:
            os._exit(1)

    started = time.monotonic()
    assert begun(tmp_path / "whole").wait() == 0
    seconds = time.monotonic() - started
    expected = whole_folder(tmp_path / "whole")
    draw = random.Random(workers)
    kills = ends = 0
    stages: set[tuple[bool, bool]] = set()
    while kills < 100:
        destination = tmp_path / f"killed-{ends}"
        limit = seconds / 2
        while True:
            process = begun(destination)
            limit *= 1.05  # the machine may have become slower
            try:
                status = process.wait(draw.uniform(0, 1) * limit)
            except psutil.TimeoutExpired:
                children = process.children(recursive=True)
                process.kill()
                process.wait()
                kills += 1
                _, alive = psutil.wait_procs(children, 60)
                assert not alive, "workers outlive the process that started them"
                units = any(destination.glob(".units/*.unit"))
                stages.add((units, any(destination.rglob("*.tar"))))
            else:
                assert status == 0
                break
        assert whole_folder(destination) == expected
        shutil.rmtree(destination)
        ends += 1
    print(f"{workers} workers: {kills} kills, {ends} preparations, stages {sorted(stages)}")
    assert {(True, False), (True, True)} <= stages
