"""Valid files of every format that comes from outside, and how each is read."""

import base64
import contextlib
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import tokenizers
import torch
from mutations import (
    mutate_bytes,
    mutate_gzip,
    mutate_header,
    mutate_json,
    mutate_lines,
    mutate_table,
    mutate_tar,
    mutate_yaml,
)
from safetensors.torch import save
from table_readers import TABLE_TEXTS, read_tables, write_tables
from text_readers import read_texts, write_texts
from token_readers import TOKEN_FORMATS

from longhaul.configs import load_run_config, load_stored_config, to_yaml
from longhaul.configs.loader import to_dict
from longhaul.datamodules.corpus import load_corpus
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.preparation.longcrawl64 import open_store
from longhaul.datamodules.preparation.resumable import _read_progress, prepare_shards
from longhaul.datamodules.shards import Block
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import OptimConfig, build_optimizer
from longhaul.pipeline.architectures.architecture import Field
from longhaul.pipeline.architectures.registry import ARCHITECTURES
from longhaul.pipeline.checkpoints.integrity import CHECKSUMS, STATE, checksum
from longhaul.pipeline.checkpoints.optimizer_state import restore_training, training_tensors
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.cluster.status import print_status
from longhaul.pipeline.evaluation.options import ContextOptions
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.exporting.card import _commit, _evaluation
from longhaul.pipeline.generation.decoding import Session
from longhaul.pipeline.generation.session_files import _digest, load_session, save_session
from longhaul.pipeline.reporting.runs import _hardware
from longhaul.pipeline.runs.done import Finished
from longhaul.pipeline.runs.exported import exported_context, exported_model, exported_weights
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.tracking.metrics_journal import Journal, read_lines

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


class Documents:
    """Six blocks of four ids, of two documents each."""

    version = 1

    def blocks(self, cursor: list[int] | None) -> Iterator[tuple[Block, list[int]]]:
        for number in range(cursor[0] if cursor else 0, 6):
            yield Block(np.full(4, number, np.uint16), np.array([1, 4], np.uint32)), [number + 1]


TEMPLATE = Manifest(
    tokenizer="bytes",
    tokenizer_sha256=build_tokenizer("bytes").sha256,
    vocab_size=257,
    bos_id=256,
    eot_id=256,
    document_tokens=4,
    dtype="uint16",
    boundaries="ends",
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
    corpus = load_corpus(folder)
    with contextlib.suppress(ValueError):
        corpus.load_tokenizer()
    corpus.training_order(min(2, corpus.block_tokens), 0, 2).locate_many(np.array([0]))
    store = ShardStore(
        corpus.sources[0], cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2
    )
    for position in range(min(3, len(store))):
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
        _read_progress(file, folder, TEMPLATE, Documents.version)


def write_tokenizer(folder: Folder) -> None:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_ranks(folder: Folder) -> None:
    every = [*(bytes([byte]) for byte in range(256)), b"ab", b"abba"]
    lines = (base64.b64encode(one) + f" {rank}\n".encode() for rank, one in enumerate(every))
    (folder / "tokenizer.gpt2.tiktoken").write_bytes(b"".join(lines))


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


CONFIG = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.vocabulary=64"),
    *("data.context=64", "optim.tokens_per_update=512", "trainer.micro_batch=1"),
]


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(load_run_config("run/demo.yaml", CONFIG).model).eval()


def trained() -> tuple[LanguageModel, torch.optim.Optimizer]:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(tokens_per_update=1))
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


def write_results(folder: Folder) -> None:
    results = Results(folder, "")
    (folder / "new.csv").write_text("1")
    result = results.store("positions", TaskResult({"loss": 1.5}, (folder / "new.csv",)))
    results.mark_complete("positions", ContextOptions(), result)


def read_results(folder: Folder) -> None:
    results = Results(folder, "")
    results.values()
    results.stored("positions", ContextOptions())


def write_run(folder: Folder) -> None:
    run = RunFolder(folder / "run")
    (folder / "run" / "slurm").mkdir(parents=True)
    results = run.path / "evaluation" / "step-000000001"
    results.mkdir(parents=True)
    (results / "results.json").write_text(json.dumps({"loss": 1.5, "more": {"x": 1}}))
    config = load_run_config("run/demo.yaml", CONFIG)
    run.config_file.write_text(to_yaml(config))
    run.mark_finished(Finished(3, 512, True))
    environment = {"commit": "abc", "accelerators": [], "processor": "one"}
    run.environment_file.write_text(json.dumps(environment))
    journal = Journal(run.path / "logs" / "metrics.jsonl")
    journal.add("status", status="RUNNING")
    journal.add("params", values={"a": "b"})
    for step in (1, 2, 3):
        values = {"curves/train_loss": 2.5, "train/tokens_per_second": 3.5, "odd": math.nan}
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
    described = {
        "model_type": "longhaul",
        "longhaul": to_dict(model.config),
        "vocab_size": model.config.vocabulary,
        "tie_word_embeddings": model.config.tied_head,
    }
    (folder / "config.json").write_text(json.dumps(described))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (folder / "a.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    index = json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def write_architecture(name: str) -> Callable[[Folder], None]:
    """Writes a config.json with all fields of an architecture, and no weights."""
    architecture = ARCHITECTURES[name]
    sizes = {
        "vocabulary": 8, "width": 16, "layers": 4, "heads": 2, "mlp_width": 8, "kv_heads": 1,
        "head_dim": 8, "learned_positions": 16,
    }  # fmt: skip
    named = {one.option: one.name for one in architecture.fields if isinstance(one, Field)}
    small = {named[option]: size for option, size in sizes.items() if option in named}
    windows = {"sliding_window": 4} if architecture.layers.has_window else {}
    switch = {"use_sliding_window": True} if architecture.layers.has_switch else {}
    heads = {"olmo_hybrid": {"num_key_value_heads": 2}, "mamba2": {"expand": 1, "n_groups": 2}}
    small |= windows | switch | heads.get(name, {})
    described = architecture.config_of(architecture.model_of(small))
    if windows and "layer_types" in described:
        del described["layer_types"]  # what they are without it
        described |= {"sliding_window_pattern": 2, "max_window_layers": 1}

    def write(folder: Folder) -> None:
        (folder / "config.json").write_text(json.dumps(described))

    return write


def read_architecture(folder: Folder) -> None:
    exported_model(folder)
    exported_context(folder)


def read_exported(folder: Folder) -> None:
    exported_model(folder)
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
    "ranks": Reader(write_ranks, {"tokenizer.gpt2.tiktoken": mutate_bytes}, read_tokenizer),
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
            "a.jsonl.bz2": mutate_bytes,
            "a.jsonl.zst": mutate_bytes,
            "a.txt.xz": mutate_bytes,
            "a.parquet": mutate_bytes,
            "a.txt": mutate_bytes,
            "a.arrow": mutate_bytes,
            "a.feather": mutate_bytes,
            "a.tar": mutate_tar,
            "saved/data.arrow": mutate_bytes,
            "saved/state.json": mutate_json,
            "saved/dataset_info.json": mutate_json,
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
    **{
        f"architecture {name}": Reader(
            write_architecture(name), {"config.json": mutate_json}, read_architecture
        )
        for name in ARCHITECTURES
    },
    **{name: Reader(*parts) for name, parts in TOKEN_FORMATS.items()},
}
