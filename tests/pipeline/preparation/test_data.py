"""`longhaul data`: what shards hold, and where a sample comes from."""

import functools
import hashlib
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from webdataset.writer import TarWriter

from longhaul.datamodules.corpus import load_corpus
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.cli import main
from longhaul.pipeline.preparation import digests, statistics
from longhaul.pipeline.preparation.digests import Digests
from longhaul.pipeline.preparation.inspection import CARD_NAME, write_card
from longhaul.pipeline.preparation.statistics import Bin, measure
from longhaul.pipeline.preparation.tracing import trace
from longhaul.pipeline.runs.data import record_data
from longhaul.pipeline.runs.folder import RunFolder, load_run

SIZE, EOT = 8, 256
NAME = "caf\udce9.jsonl"  # of a file that is named in Latin-1
Output = pytest.CaptureFixture[str]
Block = list[tuple[str, int, str, bool]]  # name, first token, characters, whether it ends here


def concatenated(texts: list[str]) -> list[Block]:
    """The documents as blocks, as `--packing concat` has them; a rest is dropped."""
    blocks: list[Block] = [[]]
    room = SIZE
    for number, text in enumerate(texts):
        first, length = 0, len(text) + 1
        while first < length:
            if not room:
                blocks.append([])
                room = SIZE
            end = min(length, first + room)
            blocks[-1].append((f"{NAME}#{number}", first, text[first:end], end == length))
            room -= end - first
            first = end
    return blocks if not room else blocks[:-1]


def write(folder: Path, blocks: list[Block], *, version: int = 2, **more: Any) -> Manifest:
    """Shards of two blocks. Version 1 has no ends; 2 without `names` has no names."""
    names = more.pop("names", True)
    folder.mkdir()
    shards = []
    for at in range(0, len(blocks), 2):
        path = folder / f"train-{at // 2:06d}.tar"
        with TarWriter(str(path), mtime=0) as writer:
            for number, block in enumerate(blocks[at : at + 2], start=at):
                ids: list[int] = []
                ends = []
                for _, _, text, is_last in block:
                    ids += [*text.encode(), *([EOT] if is_last else [])]
                    ends.append(len(ids))
                member = {"__key__": f"{number:09d}", "tokens.npy": np.array(ids, np.uint16)}
                if version == 2:
                    member["ends.npy"] = np.array(ends, np.uint32)
                    if names:
                        texts = [(name, first) for name, first, _, _ in block]
                        member["texts.json"] = json.dumps(texts).encode()
                writer.write(member)
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        size = len(blocks[at : at + 2])
        shards.append(ShardEntry(name=path.name, bytes=len(content), documents=size, sha256=sha256))
    manifest = Manifest(
        format_version=version,
        tokenizer="bytes",
        tokenizer_sha256=build_tokenizer("bytes").sha256,
        vocab_size=257,
        bos_id=EOT,
        eot_id=EOT,
        document_tokens=SIZE,
        dtype="uint16",
        boundaries="ends" if version == 2 else "none",
        shards=tuple(shards),
        **more,
    )
    manifest.save(folder)
    return load_corpus(folder).sources[0]


TEXTS = [
    "abc",
    "",
    "a long one of 3 blocks",
    "abc",
    "a long one of 3 blocks",
    "x" * 15,
    "lost its end",
]
LENGTHS = [Bin(1, 1, 1, 1), Bin(2, 3, 0, 0), Bin(4, 7, 2, 8), Bin(8, 15, 0, 0)]
LENGTHS += [Bin(16, 31, 3, 23 + 23 + 16)]


@pytest.mark.parametrize("kind", ["names", "ends", "version 1"])
def test_documents_are_counted_across_blocks(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"version": 1} if kind == "version 1" else {"names": kind == "names"}
    blocks = concatenated(TEXTS)
    manifest = write(tmp_path / "a", blocks, **options)
    found = measure(manifest)
    lost = SIZE * len(blocks) - sum(len(text) + 1 for text in TEXTS[:-1])
    assert 0 < lost < len(TEXTS[-1])
    extra = [Bin(*one) for one in LENGTHS]
    place = lost.bit_length() - 1
    extra[place] = extra[place]._replace(
        documents=extra[place].documents + 1, tokens=extra[place].tokens + lost
    )
    assert found.bins == extra
    assert (found.documents, found.cut, found.duplicates) == (7, 1, 2)
    assert (found.smallest_id, found.largest_id) == (ord(" "), EOT)
    assert [one.shard for one in found.samples] == [
        f"train-{number:06d}.tar" for number in (0, len(blocks) // 4, (len(blocks) - 1) // 2)
    ]
    assert measure(manifest, reads_all=False).bins == extra


def test_pieces_may_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = [("b", 16, "rest", True), ("c", 0, "yz", True)]
    blocks = [late, [("d", 0, "12345678", False)], [("b", 8, "follows.", False)]]
    blocks += [[("d", 0, "12345678", False)], [("b", 0, "begins..", False)]]
    same = [(name.replace("b", "e"), *rest) for block in blocks for name, *rest in block]
    blocks += [[piece] for piece in same if piece[0] == "e" and piece[1] < 16]
    blocks += [[same[0], ("f", 0, "xy", True)]]  # type: ignore[list-item]
    found = measure(write(tmp_path / "a", blocks))
    # `d` is cropped twice; `b` and `e` have 21 tokens, in three pieces of three blocks.
    assert (found.documents, found.cut, found.not_compared) == (6, 2, 0)
    assert found.duplicates == 2
    assert sum(one.tokens for one in found.bins) == 64
    monkeypatch.setattr(statistics, "_MOST_HELD", 7)
    found = measure(load_corpus(tmp_path / "a").sources[0])
    assert (found.documents, found.not_compared, found.duplicates) == (6, 2, 1)


def test_rows_of_longcrawl64_are_documents(tmp_path: Path) -> None:
    blocks = [[("", 0, text, False)] for text in ("12345678", "abcdefgh", "12345678")]
    found = measure(write(tmp_path / "a", blocks, version=1, source={"kind": "longcrawl64"}))
    assert (found.documents, found.cut, found.duplicates) == (3, 0, 1)
    assert found.bins == [Bin(8, 15, 3, 24)]


def test_equal_digests_are_counted_in_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_HELD_BYTES", 16 * 7)
    counted = Digests()
    for number in [*range(100), *range(50), 3, 3]:
        counted.add(hashlib.blake2b(bytes([number]), digest_size=16).digest())
        assert len(counted._held) < 16 * 7
    assert counted.repeated() == 52


def test_shards_are_shown_and_written_as_json(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train", concatenated(TEXTS), dropped_tokens=3, empty_texts=2)
    write(tmp_path / "validation", concatenated(TEXTS), version=1)
    assert main(["data", str(tmp_path), "--json", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "train/manifest.json (format 2, bytes)" in shown
    assert "validation/manifest.json (format 1, bytes)" in shown
    assert "2 documents (28.57%) have the tokens of an earlier one" in shown
    assert "3 tokens that fill no block (3.61%), 2 empty texts" in shown
    assert (
        "train-000000.tar, block 0, tokens 0 to 3: caf\\udce9.jsonl#0 from its token 0 on\n  'abc"
        in shown
    )
    assert "block 0, tokens 0 to 3 (prepared without names)" in shown
    content = json.loads((tmp_path / "a.json").read_text())
    train, validation = content["corpora"]
    assert train["lengths"] == validation["lengths"]
    assert train["samples"][0]["text"] == "abc<|endoftext|>"
    # The same from a server.
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/train/manifest.json"
        assert main(["data", url, "--json", "b.json"]) == 0
        server.shutdown()
    again = json.loads(Path("b.json").read_text())["corpora"][0]
    assert {**again, "manifest": train["manifest"]} == train


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("names", [True, False])
def test_a_sample_is_traced_to_its_documents(tmp_path: Path, capsys: Output, names: bool) -> None:
    corpus = tmp_path / "train"
    write(corpus, concatenated(TEXTS), names=names)
    command = ["data", "run/demo.yaml", f"data.manifest={corpus}", "data.context=4"]
    command += ["data.validation_manifest=null", "--json", "a.json", "--sample"]
    whole = {f"{NAME}#{number}": [*text.encode(), EOT] for number, text in enumerate(TEXTS)}
    order = load_corpus(corpus).training_order(4, 0, 8)
    windows = 2 * len(concatenated(TEXTS))
    seen = []
    for number in (0, 1, windows, windows + 5):
        assert main([*command, str(number)]) == 0
        found = json.loads(Path("a.json").read_text())
        where = order.locate_many(np.array([number]))
        assert (found["epoch"], found["block"]) == (number // windows, int(where.block[0]))
        tokens = []
        for one in found["documents"]:
            if names:
                tokens += whole[one["name"]][one["first"] : one["end"]]
            else:
                assert (one["name"], one["first"]) == (None, None)
        shown = capsys.readouterr().out
        if not names:
            assert "of a document (prepared without names)" in shown
            continue
        assert f"  {one_line(found['documents'][0]['name'])}, tokens " in shown
        assert len(tokens) == 4
        seen.append((found["shard"], found["block"], found["first"]))
    assert not names or len({*seen}) > 2


def test_a_sample_of_several_sources_is_traced_as_training_reads_it(tmp_path: Path) -> None:
    options = ["data.manifest=null", "data.validation_manifest=null", "data.context=4"]
    options += ["optim.tokens_per_update=128", "trainer.micro_batch=1", "trainer.max_tokens=1280"]
    for name, weight in (("a", 0.75), ("b", 0.25)):
        write(tmp_path / name, concatenated(TEXTS))
        options += [f"data.sources.{name}.manifest={tmp_path / name}"]
        options += [f"data.sources.{name}.weight={weight}"]
    config = load_run("run/demo.yaml", options)
    data = TokenDataModule(
        config.data,
        seed=config.trainer.seed,
        samples_per_update=config.samples_per_update,
        micro_batch=1,
    )
    assert config.samples_per_update == 32
    where = data.order.locate_many(np.arange(64))
    seen = []
    for number, (source, shard, block) in enumerate(
        zip(where.source.tolist(), where.shard.tolist(), where.block.tolist(), strict=True)
    ):
        found = trace(config, number)
        seen.append(Path(found["manifest"]).parent.name)
        assert (seen[-1], found["block"]) == ("ab"[source], block)
        assert found["shard"] == f"train-{shard:06d}.tar"
    assert (seen.count("a"), seen.count("b")) == (48, 16)
    # In a run whose weights have changed, the earlier ones are those that it has recorded.
    record_data(RunFolder.of(config), config.data)
    later = load_run(
        "run/demo.yaml", [*options[:-1], "data.sources.b.weight=9", "data.from_tokens=128"]
    )
    assert [Path(trace(later, n)["manifest"]).parent.name for n in range(32)] == seen[:32]


def test_a_card_is_written_beside_the_shards(tmp_path: Path) -> None:
    manifest = write(tmp_path / "a", concatenated(TEXTS), source={"kind": "text", "a|b": "x" * 400})
    leftover = tmp_path / "a" / f".{CARD_NAME}.0123.tmp"
    leftover.touch()
    write_card(tmp_path / "a", manifest)
    assert not leftover.exists()
    card = (tmp_path / "a" / CARD_NAME).read_text()
    assert "| documents | 7, 1 of them without their end |" in card
    assert "| 16 | 31 | 3 | 62 |" in card
    assert f"| a\\|b | {'x' * 297}... |" in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "nowhere"], "nowhere: found no manifest.json there, wanted a folder of shards"),
        (["data", "a", "x=1"], "found 'x=1' without --sample, wanted DST alone"),
        (["data", "a", "--json", "b/c"], "--json: found no folder b, wanted one for the file"),
        (["data", "a"], "texts.json of block 0: 1 documents, wanted 2"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: Output, arguments: list[str], message: str
) -> None:
    write(tmp_path / "a", [[("a", 0, "abc", True), ("b", 0, "def", True)]])
    path = tmp_path / "a" / "train-000000.tar"
    content = path.read_bytes().replace(b'[["a", 0], ["b", 0]]', b'[["a", 0]          ]')
    path.write_bytes(content)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
