"""Thousands of damaged and hostile files through every reader of files that come from outside.

Each is a valid file with a few mutations. A reader may accept it, or refuse it with a ValueError or
an OSError of one short line: nothing else, in bounded memory.
"""

import contextlib
import gzip
import hashlib
import io
import json
import logging
import math
import random
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from safetensors.torch import save

from longhaul.configs import load_run_config, load_stored_config, to_yaml
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.order import SampleOrder
from longhaul.datamodules.preparation.corpus import open_corpus
from longhaul.datamodules.preparation.longcrawl64 import open_store
from longhaul.datamodules.preparation.resumable import _read_progress, prepare_shards
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.tokenizer import build_tokenizer, tokenizer_of
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.checkpoints.integrity import CHECKSUMS, STATE, checksum
from longhaul.pipeline.checkpoints.optimizer_state import restore_training, training_tensors
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.cluster.status import print_status
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import Options, Task, TaskResult
from longhaul.pipeline.exporting.card import _commit, _evaluation
from longhaul.pipeline.exporting.weights import saved_tensors
from longhaul.pipeline.generation.decoding import Session
from longhaul.pipeline.generation.session_files import _digest, load_session, save_session
from longhaul.pipeline.planning.sizes import build_on_meta
from longhaul.pipeline.reporting.runs import _hardware
from longhaul.pipeline.reporting.tables import TABLES, read_table
from longhaul.pipeline.runs.exported import exported_shape, exported_weights, shape_of
from longhaul.pipeline.runs.folder import Finished, RunFolder
from longhaul.pipeline.tracking.metrics_journal import Journal, read_lines

pytestmark = pytest.mark.wide

CASES_PER_FILE = 110
LONGEST_LINE = 1500
SECONDS_PER_CASE = 60  # a guard against endless loops, not a measurement
MOST_GROWTH = 1 << 30  # bytes

Folder = Path
Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader, and the files in a folder that it reads."""

    write: Callable[[Folder], None]
    """Writes valid files."""
    files: dict[str, Mutate]
    """The files that are mutated, and how."""
    read: Callable[[Folder], object]
    mend: Callable[[Folder], None] = lambda folder: None
    """Makes hashes fit again, as whoever wants to do harm would."""


# ---- mutations ----

HUGE = "9" * 30
TEXTS = ("", "x", "..", "../../etc/passwd", "/dev/zero", "a\nb", "x" * 300, "${oc.env:HOME}", "\0")
LITERALS = (
    *("null", "true", "0", "-1", "1", "2", "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e400"),
    *(HUGE, f"-{HUGE}", "9" * 5000, str(2**31), str(2**53), str(2**60), str(2**62), str(2**63)),
    *("[]", "{}", "[[]]", "[1]", '[null, "x"]', '{"a": 1}', "[" * 5000, "[" * 150 + "]" * 150),
    *map(json.dumps, TEXTS),
    '"\\ud800"',
)
_MARK = "@literal@"


def mutate_json(draw: random.Random, content: bytes) -> bytes:
    """Another value, a key less or more, at any depth; sometimes damaged bytes too."""
    values = json.loads(content)
    literals: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        values = _changed(draw, values, literals)
    text = json.dumps(values)
    for number, literal in enumerate(literals):
        text = text.replace(f'"{_MARK}{number}"', literal)
    return mutate_bytes(draw, text.encode()) if draw.random() < 0.1 else text.encode()


def _changed(draw: random.Random, values: Any, literals: list[str]) -> Any:
    """The tree with one change, whose hostile values are marks for what JSON text cannot hold."""
    nodes = list(_nodes(values))
    holder, key = draw.choice(nodes) if nodes else (None, None)

    def hostile() -> str:
        literals.append(draw.choice(LITERALS))
        return f"{_MARK}{len(literals) - 1}"

    if holder is None or draw.random() < 0.02:
        return hostile()
    match draw.choice(("value", "value", "value", "missing", "extra", "swap", "repeat")):
        case "value":
            holder[key] = hostile()
        case "missing":
            del holder[key]
        case "extra" if isinstance(holder, dict):
            holder[draw.choice((*TEXTS, "extra", str(key) + "x"))] = hostile()
        case "swap":
            other_holder, other = draw.choice(nodes)
            with contextlib.suppress(KeyError, IndexError, TypeError):
                holder[key] = json.loads(json.dumps(other_holder[other]))
        case _:
            if isinstance(holder, list):
                holder.extend(holder[:50])
            elif isinstance(holder[key], int | float):
                holder[key] = holder[key] * draw.choice((-1, 2, 1000, 2**40))
    return values


def _nodes(values: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = values if isinstance(values, dict) else range(len(values))
    if isinstance(values, dict | list):
        for key in list(keys):
            yield values, key
            if isinstance(values[key], dict | list):
                yield from _nodes(values[key])


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flipped, missing, repeated, inserted bytes; another end."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 2, 8, 64))
        match draw.choice(("flip", "flip", "cut", "remove", "insert", "zero", "large", "end")):
            case "flip" if changed:
                changed[at % len(changed)] ^= 1 << draw.randrange(8)
            case "cut":
                del changed[at:]
            case "remove":
                del changed[at : at + length]
            case "insert":
                changed[at:at] = draw.randbytes(length)
            case "zero":
                changed[at : at + length] = bytes(length)
            case "large":
                changed[at : at + 8] = struct.pack("<Q", draw.choice((2**62, 2**64 - 1, 2**31)))
            case _:
                changed += draw.choice((b"\0", b"\n", b"{", b"\xff" * 600))
    return bytes(changed)


def mutate_start(draw: random.Random, content: bytes) -> bytes:
    """As above, within the headers at the beginning."""
    place = min(len(content), 700)
    return mutate_bytes(draw, content[:place]) + content[place:]


def mutate_tar(draw: random.Random, content: bytes) -> bytes:
    """As above, with the checksum of the tar header that it should have."""
    changed = bytearray(mutate_start(draw, content))
    if draw.random() < 0.7 and len(changed) > 512:
        changed[148:156] = b" " * 8
        changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


def mutate_lines(draw: random.Random, content: bytes) -> bytes:
    """One line of JSON lines, or the bytes of all."""
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.3:
        return mutate_bytes(draw, content)
    place = draw.randrange(len(lines))
    lines[place] = mutate_json(draw, lines[place]) + b"\n"
    return b"".join(lines)


def mutate_table(draw: random.Random, content: bytes) -> bytes:
    """Another cell, a row or a column too much or missing."""
    if draw.random() < 0.2:
        return mutate_bytes(draw, content)
    rows = [line.split(",") for line in content.decode().splitlines()]
    place = draw.randrange(len(rows))
    cell = draw.randrange(len(rows[0]))
    match draw.choice(("cell", "cell", "longer", "shorter", "empty", "column")):
        case "cell":
            rows[place][cell] = draw.choice((*TEXTS, *LITERALS, "=1+1", '"', "nan", "inf"))
        case "longer":
            rows[place].append("1")
        case "shorter":
            rows[place].pop()
        case "empty":
            rows = rows[: draw.choice((0, 1))]
        case _:
            for row in rows:
                del row[cell]
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogatepass")


def mutate_yaml(draw: random.Random, content: bytes) -> bytes:
    """Another value, key or indentation in one line; aliases, tags."""
    lines = content.decode().splitlines()
    place = draw.randrange(len(lines))
    key, _, value = lines[place].partition(":")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    others = (*LITERALS, ".inf", ".nan", "1:30", "2026-13-45", "2026-01-01", "!!binary x", "? a")
    match draw.choice(("value", "value", "value", "key", "missing", "indent", "bytes", "rare")):
        case "value":
            lines[place] = f"{key}: {draw.choice(others)}"
        case "key":
            lines[place] = f"{draw.choice(('x', '3', '? []', '<<', 'null'))}:{value}"
        case "missing":
            del lines[place]
        case "indent":
            lines[place] = f"  {lines[place]}"
        case "bytes":
            return mutate_bytes(draw, content)
        case _:
            rare = ("!!python/object/apply:os.getcwd []", "${oc.env:PATH}", "&x [*x]", "[" * 3000)
            lines = [*bomb.splitlines(), *lines] if draw.random() < 0.3 else lines
            lines.append(f"extra: {draw.choice(rare)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_header(draw: random.Random, content: bytes) -> bytes:
    """The JSON header of a safetensors file, or its bytes; the texts in its metadata too."""
    if draw.random() < 0.3:
        return mutate_start(draw, content)
    (size,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + size], content[8 + size :]
    values = json.loads(header)
    metadata = values.get("__metadata__", {})
    inner = [key for key, text in metadata.items() if text.startswith("{")]
    if inner and draw.random() < 0.4:
        key = draw.choice(inner)
        changed = mutate_json(draw, metadata[key].encode())
        metadata[key] = changed.decode(errors="replace")
        header = json.dumps(values).encode()
    else:
        header = mutate_json(draw, header)
    length = draw.choice((len(header),) * 8 + (0, 2**62, len(header) - 1))
    return struct.pack("<Q", length) + header + rest


def mutate_gzip(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.5:
        return mutate_bytes(draw, content)
    return gzip.compress(mutate_lines(draw, gzip.decompress(content)), 1)


# ---- valid files, and how they are read ----


class Documents:
    """Six documents of four ids."""

    dropped_tokens = 0

    def documents(self, cursor: list[int] | None) -> Iterator[tuple[Any, list[int]]]:
        for number in range(cursor[0] if cursor else 0, 6):
            yield np.full(4, number, np.uint16), [number + 1]


TEMPLATE = Manifest(
    tokenizer="bytes",
    tokenizer_sha256=build_tokenizer("bytes").sha256,
    vocab_size=257,
    bos_id=256,
    eot_id=256,
    document_tokens=4,
    dtype="uint16",
    source={"kind": "test", "rows": [[0, 6]]},
    shards=(),
)


def write_shards(folder: Folder) -> None:
    prepare_shards(
        folder,
        TEMPLATE,
        Documents(),
        docs_per_shard=3,
        prefix="train",
        progress=lambda tokens: None,
    )


def mend_manifest(folder: Folder) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    for shard in content["shards"]:
        data = (folder / shard["name"]).read_bytes()
        shard |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(content))


def read_shards(folder: Folder) -> None:
    manifest = load_manifest(folder)
    with contextlib.suppress(ValueError):
        tokenizer_of(manifest)
    SampleOrder(manifest, min(2, manifest.document_tokens), 0, 2).locate(0)
    store = ShardStore(
        manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2
    )
    for position in range(min(3, len(manifest.shards))):
        store[position]


def write_progress(folder: Folder) -> None:
    write_shards(folder)
    manifest = load_manifest(folder)
    lines: list[Any] = [{"source": TEMPLATE.source}]
    for number, shard in enumerate(manifest.shards, start=1):
        lines.append({"shard": vars(shard), "cursor": [3 * number]})
    (folder / "progress").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_progress(folder: Folder) -> None:
    with (folder / "progress").open("r+b") as file:
        _read_progress(file, folder, TEMPLATE)


def write_tokenizer(folder: Folder) -> None:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def read_tokenizer(folder: Folder) -> None:
    tokenizer = build_tokenizer(str(folder))
    ids = tokenizer.encode("abba <|endoftext|>").tolist()
    tokenizer.decode(ids)
    decoder = tokenizer.stream_decoder()
    "".join([*map(decoder.push, ids), decoder.flush()])


def write_zarr(codec: str | None) -> Callable[[Folder], None]:
    def write(folder: Folder) -> None:
        meta = {
            "zarr_format": 2,
            "shape": [4, 8],
            "chunks": [4, 8],
            "dtype": "<u2",
            "compressor": codec and {"id": codec, "level": 1},
            "order": "C",
            "filters": None,
            "fill_value": 0,
        }
        (folder / ".zarray").write_text(json.dumps(meta))
        content = np.arange(32, dtype="<u2").tobytes()
        if codec:
            content = bytes(numcodecs.get_codec({"id": codec}).encode(content))
        (folder / "0.0").write_bytes(content)

    return write


def read_zarr(folder: Folder) -> None:
    store = open_store(folder)
    assert len(store.missing) <= 1 << 20
    store.read_chunk("0.0")


def write_texts(folder: Folder) -> None:
    lines = "".join(json.dumps({"id": n, "text": f"text {n} é"}) + "\n" for n in range(20))
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "a.txt").write_text("some text")
    table = pyarrow.table({"id": list(range(20)), "text": [f"text {n}" for n in range(20)]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")


def read_texts(folder: Folder) -> None:
    for text in open_corpus([str(folder)]).texts():
        for piece in text.pieces():
            build_tokenizer("bytes").encode(piece)


CONFIG = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.vocabulary=64"),
    *("data.context=64", "optim.tokens_per_update=512", "trainer.micro_batch=1"),
]


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(load_run_config("run/demo.yaml", CONFIG).model).eval()


def trained() -> tuple[LanguageModel, torch.optim.Optimizer]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


STEP = "checkpoints/step-000000001"
TENSORS = {
    group: f"{STEP}/{group}-00000-000.safetensors" for group in ("model", "optimizer", "rng")
}


def write_checkpoint(folder: Folder) -> None:
    tensors = training_tensors(*trained())
    tensors |= {f"rng/{name}": tensor for name, tensor in capture_rng().items()}
    skip = {"step": 1, "first_sample": 0, "last_sample": 7, "is_spike": True, "rewound_to": None}
    progress = {
        **{"step": 1, "samples": 8, "tokens": 512, "skipped": [skip], "skipped_in_a_row": 0},
        "recent_losses": [1.5, math.nan],
    }
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    store.start(1, tensors, {"progress": progress, "shards_sha256": "0" * 64})
    store.wait()


def mend_checkpoint(folder: Folder) -> None:
    path = folder / STEP
    content = json.loads((path / CHECKSUMS).read_text())
    content["files"] = {name: checksum(path / name) for name in content["files"]}
    (path / CHECKSUMS).write_text(json.dumps(content))


def read_checkpoint(folder: Folder) -> None:
    saved = SavedCheckpoint(folder / STEP)
    saved.state(TrainingState)
    random_state = capture_rng()
    try:
        restore_rng(saved.read_group("rng"))
    finally:
        restore_rng(random_state)
    model, optimizer = trained()
    restore_training(model, optimizer, saved)
    optimizer.step()
    saved_tensors(folder / STEP, [Path(TENSORS["model"]).name], "model")


def write_session(folder: Folder) -> None:
    session = Session([3, 4])
    session.read(small_model())
    session.unread = [5]
    save_session(folder / "session", session, "origin")


def mend_session(folder: Folder) -> None:
    """The digest of whatever tensors the file still has."""
    from safetensors import safe_open

    with contextlib.suppress(Exception):
        with safe_open(folder / "session", "pt") as file:
            described = json.loads(file.metadata()["longhaul_session"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described["sha256"] = _digest(tensors, described["unread"])
        metadata = {"longhaul_session": json.dumps(described)}
        (folder / "session").write_bytes(save(tensors, metadata))


def read_session(folder: Folder) -> None:
    model = small_model()
    session = load_session(folder / "session", model, "origin")
    session.unread.append(1)
    session.read(model)


TASK = Task("positions", "", decided_by=("context",))


def write_results(folder: Folder) -> None:
    results = Results(folder, "")
    (folder / "new.csv").write_text("1")
    result = results.store("positions", TaskResult({"loss": 1.5}, (folder / "new.csv",)))
    results.mark_complete("positions", TASK, Options(), result)


def read_results(folder: Folder) -> None:
    results = Results(folder, "")
    results.values()
    results.stored("positions", TASK, Options())


TABLE_TEXTS = {
    "positions": "position,loss_nats,mean_up_to_here,samples\n1,5.0,5.0,8\n2,4.0,4.5,8\n",
    "context": "context,tokens,loss_nats\n64,1024,5.0\n128,1024,4.0\n",
    "perplexity": "window,stride,documents,tokens,loss_nats,perplexity\n64,16,2,1024,1,20.0\n",
    "passkey": "length,depth,prompts,right,accuracy\n256,0.0,4,4,1.0\n512,0.5,4,2,0.5\n",
}


def write_tables(folder: Folder) -> None:
    for task, text in TABLE_TEXTS.items():
        (folder / f"{task}.csv").write_text(text)


def read_tables(folder: Folder) -> None:
    for task in TABLES:
        text = (folder / f"{task}.csv").read_bytes().decode()
        for row in read_table(task, text, f"{task}.csv"):
            assert all(isinstance(row[key], int | float) for key in TABLES[task].__annotations__)


def write_run(folder: Folder) -> None:
    run = RunFolder(folder / "run")
    (folder / "run" / "slurm").mkdir(parents=True)
    results = run.path / "evaluation" / "step-000000001"
    results.mkdir(parents=True)
    (results / "results.json").write_text(json.dumps({"loss": 1.5, "more": {"x": 1}}))
    config = load_run_config("run/demo.yaml", [*CONFIG, "model.layer_attention={}"])
    run.config_file.write_text(to_yaml(config))
    run.mark_finished(Finished(3, 512, True))
    environment = {"commit": "abc", "accelerators": [], "processor": "one"}
    run.environment_file.write_text(json.dumps(environment))
    journal = Journal(run.path / "logs" / "metrics.jsonl")
    journal.add("status", status="RUNNING")
    journal.add("params", values={"a": "b"})
    for step in (1, 2, 3):
        values = {"train/loss": 2.5, "train/tokens_per_second": 3.5, "odd": math.nan}
        journal.append("train", step, values)
    journal.add("artifact", path="logs/x", folder="")
    journal.add("checkpoint", step=3, path="checkpoints/x", values={"loss": "Infinity"})
    journal.close()
    (run.path / "slurm" / "jobs.jsonl").write_text('{"kind": "train", "job_id": "7"}\n')


def read_run(folder: Folder) -> None:
    run = RunFolder(folder / "run")
    run.finished()
    lines, _ = read_lines(run.path / "logs" / "metrics.jsonl")
    for line in lines:
        [float(value) for value in line.get("values", {}).values() if line["kind"] == "train"]
    _commit(run)
    _evaluation(run, run.checkpoints / "step-000000001")
    _hardware(lambda name: (run.path / name).read_bytes().decode())


def read_config(folder: Folder) -> None:
    build_on_meta(load_stored_config(folder / "run" / "config.yaml").model)


def read_status(folder: Folder) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        print_status([str(folder)], None)


def write_exported(folder: Folder) -> None:
    model = small_model()
    shape = shape_of(model.config)
    attention = list(shape["attention"].values())
    described = {**shape, "model_type": "longhaul", "attention": attention}
    (folder / "config.json").write_text(json.dumps(described))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (folder / "a.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    index = json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def read_exported(folder: Folder) -> None:
    exported_shape(folder)
    exported_weights(folder)


READERS = {
    "manifest": Reader(write_shards, {"manifest.json": mutate_json}, read_shards),
    "shard": Reader(
        write_shards,
        {"train-000000.tar": mutate_tar},
        read_shards,
        mend_manifest,
    ),
    "progress": Reader(write_progress, {"progress": mutate_lines}, read_progress),
    "tokenizer": Reader(write_tokenizer, {"tokenizer.json": mutate_json}, read_tokenizer),
    "zarr": Reader(write_zarr("zlib"), {".zarray": mutate_json}, read_zarr),
    **{
        f"chunk {codec}": Reader(write_zarr(codec), {"0.0": mutate_bytes}, read_zarr)
        for codec in ("blosc", "gzip", "lz4", "zlib", "zstd", None)
    },
    "texts": Reader(
        write_texts,
        {
            "a.jsonl": mutate_lines,
            "a.jsonl.gz": mutate_gzip,
            "a.parquet": mutate_bytes,
            "a.txt": mutate_bytes,
        },
        read_texts,
    ),
    "checksums": Reader(write_checkpoint, {f"{STEP}/{CHECKSUMS}": mutate_json}, read_checkpoint),
    "checkpoint": Reader(
        write_checkpoint,
        {f"{STEP}/{STATE}": mutate_json, **dict.fromkeys(TENSORS.values(), mutate_header)},
        read_checkpoint,
        mend_checkpoint,
    ),
    "session": Reader(write_session, {"session": mutate_header}, read_session, mend_session),
    "results": Reader(write_results, {"positions.json": mutate_json}, read_results),
    "tables": Reader(
        write_tables, {f"{task}.csv": mutate_table for task in TABLE_TEXTS}, read_tables
    ),
    "run": Reader(
        write_run,
        {
            "run/DONE": mutate_json,
            "run/environment.json": mutate_json,
            "run/logs/metrics.jsonl": mutate_lines,
            "run/evaluation/step-000000001/results.json": mutate_json,
        },
        read_run,
    ),
    "config": Reader(write_run, {"run/config.yaml": mutate_yaml}, read_config),
    "status": Reader(
        write_run,
        {
            "run/config.yaml": mutate_yaml,
            "run/logs/metrics.jsonl": mutate_lines,
            "run/slurm/jobs.jsonl": mutate_lines,
        },
        read_status,
    ),
    "exported": Reader(
        write_exported,
        {
            "config.json": mutate_json,
            "model.safetensors.index.json": mutate_json,
            "a.safetensors": mutate_header,
        },
        read_exported,
    ),
}


@dataclass
class Tally:
    """What became of the cases of a reader."""

    cases: int = 0
    refused: int = 0
    failures: list[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.failures = []


class TooSlowError(BaseException):
    """Not an Exception, which a reader might catch."""


def fuzz(reader: Reader, folder: Folder, cases_per_file: int, seed: int) -> Tally:
    """Mutate each file of a reader so many times, and read it."""
    tally = Tally()
    folder.mkdir(parents=True)
    reader.write(folder)
    valid = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader.read(folder)

    def ring(number: int, frame: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, ring)
    for name, mutate in reader.files.items():
        path = folder / name
        for case in range(cases_per_file):
            draw = random.Random(f"{seed} {folder.name} {name} {case}")
            content = mutate(draw, valid[path])
            path.write_bytes(content)
            reader.mend(folder)
            tally.cases += 1
            signal.alarm(SECONDS_PER_CASE)
            try:
                reader.read(folder)
            except (ValueError, OSError) as error:
                tally.refused += 1
                line = str(error)
                if not line or "\n" in line or len(line) > LONGEST_LINE:
                    tally.failures.append(f"{name}, case {case}: message {line[:2000]!r}")
            except BaseException:
                tally.failures.append(f"{name}, case {case}: {traceback.format_exc()}")
            finally:
                signal.alarm(0)
                for each, before in valid.items():
                    each.write_bytes(before)
    return tally


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", READERS)
def test_no_file_from_outside_brings_a_traceback(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("longhaul").setLevel(logging.ERROR)
    before = peak_bytes()
    tally = fuzz(READERS[name], tmp_path / name, CASES_PER_FILE, seed=0)
    with capfd.disabled():
        print(
            f"\n{name}: {tally.cases} cases, {tally.refused} refused, "
            f"{len(tally.failures)} tracebacks"
        )
    assert not tally.failures, "\n\n".join(tally.failures[:5])
    assert peak_bytes() - before < MOST_GROWTH
