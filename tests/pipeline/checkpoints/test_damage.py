"""Checkpoints whose files are not what they should be, although all hashes fit."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longhaul.pipeline.checkpoints.integrity import (
    CHECKSUMS,
    STATE,
    CheckpointError,
    _Checksum,
    _share,
    checksum,
)
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState

MODEL = "model-00000-000.safetensors"
PROGRESS = {
    **{"step": 3, "samples": 24, "tokens": 1536, "skipped": [], "skipped_in_a_row": 0},
    "recent_losses": [2.5, float("nan")],
}


def save(folder: Path) -> Path:
    tensors = {"model/a": torch.ones(4, 2), "model/b": torch.ones(3), "rng/x": torch.ones(2)}
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    path = store.start(3, tensors, {"progress": PROGRESS, "shards_sha256": "0" * 64})
    store.wait()
    return path


def mend_hashes(path: Path) -> None:
    content = json.loads((path / CHECKSUMS).read_text())
    content["files"] = {name: checksum(path / name) for name in content["files"]}
    (path / CHECKSUMS).write_text(json.dumps(content))


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A file of tensors with another header."""

    def changed(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return changed


def with_offsets(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(header: dict[str, Any]) -> None:
        placed = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        change(placed)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(placed)

    return with_header(changed)


TENSORS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pickle": (lambda _: pickle.dumps({"a": 1}), "wanted the header of a safetensors file"),
    "an empty file": (lambda _: b"", "found a header of 0 bytes in a file of 0"),
    "a header of 2^62 bytes": (
        lambda content: struct.pack("<Q", 1 << 62) + content[8:],
        "found a header of 4,611,686,018,427,387,904 bytes",
    ),
    "a cut header": (lambda content: content[:40], "wanted the header of a safetensors file"),
    "nested": (
        lambda _: struct.pack("<Q", 5000) + b"[" * 5000,
        "found no JSON, recursion limit exceeded at line 1 column 202; wanted JSON",
    ),
    "cut tensors": (lambda content: content[:-4], "bytes, wanted "),
    "more bytes": (lambda content: content + b"1234", "bytes, wanted "),
    "no sharding": (
        with_header(lambda header: header["__metadata__"].pop("DCP_SHARDING_INFO")),
        "DCP_SHARDING_INFO: found nothing, wanted the offsets of the tensors",
    ),
    "no metadata": (with_header(lambda header: header.pop("__metadata__")), "found nothing"),
    "no offset of a tensor": (
        with_offsets(lambda placed: placed.pop("model/b")),
        "found nothing for 'model/b', wanted its offset",
    ),
    "an offset of other dimensions": (
        with_offsets(lambda placed: placed["model/a"].update(saved_offsets=[1])),
        r"found \(1,\) for 'model/a', wanted 2 numbers",
    ),
    "an offset beyond the tensor": (
        with_offsets(lambda placed: placed["model/a"].update(saved_offsets=[1 << 40, 0])),
        "found 8 numbers for 'model/a', wanted ",
    ),
    "a shape of text": (
        with_header(lambda header: header["model/a"].update(shape="4")),
        "shape: found '4', wanted a valid array",
    ),
    "a large shape": (
        with_header(lambda header: header["model/a"].update(shape=[10**12, 10**6])),
        "data_offsets: found ",
    ),
    "another type": (
        with_header(lambda header: header["model/a"].update(dtype="OBJECT")),
        "dtype: found 'OBJECT', wanted one of",
    ),
    "overlapping tensors": (
        with_header(lambda header: header["model/b"].update(data_offsets=[0, 12])),
        "data_offsets: found ",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_file_of_tensors_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    change, message = TENSORS[name]
    path = save(tmp_path)
    (path / MODEL).write_bytes(change((path / MODEL).read_bytes()))
    mend_hashes(path)
    with pytest.raises(CheckpointError, match=f"{path}[^\n]*{message}[^\n]*$"):
        SavedCheckpoint(path)


def test_files_that_contradict_each_other_are_set_aside(tmp_path: Path) -> None:
    path = save(tmp_path)
    change, _ = TENSORS["an offset beyond the tensor"]
    (path / MODEL).write_bytes(change((path / MODEL).read_bytes()))
    mend_hashes(path)
    with pytest.raises(CheckpointError, match="found only damaged checkpoints"):
        CheckpointStore(path.parent, keep_last=1).open_newest()
    assert [one.name for one in path.parent.iterdir()] == [f"{path.name}.damaged"]


def test_a_file_that_was_replaced_since_is_not_repeated_over_a_tensor(tmp_path: Path) -> None:
    path = save(tmp_path)
    saved = SavedCheckpoint(path)
    save_file({"model/a": torch.ones(1, 2), "model/b": torch.ones(3)}, path / MODEL)
    wanted = rf"{path}.*{MODEL}: found shape \(1, 2\) for a part of model/a, wanted shape \(4, 2\)"
    with pytest.raises(CheckpointError, match=wanted):
        saved.read_one("model/a")


STATES: dict[str, tuple[Any, str]] = {
    "a list": ([], "state.json: found .., wanted an object"),
    "empty": ({}, "progress: found nothing, wanted a value"),
    "no step": ({"progress": {"samples": 1}}, "progress.step: found nothing, wanted a value"),
    "another key": (
        {"progress": {**{k: v for k, v in PROGRESS.items() if k != "samples"}, "sample": 24}},
        "progress.samples: found nothing, wanted a value",
    ),
    "text for a number": (
        {"progress": PROGRESS | {"step": "3"}},
        "progress.step: found '3', wanted a valid integer",
    ),
    "a fraction": (
        {"progress": PROGRESS | {"tokens": 1.5}},
        "progress.tokens: found 1.5, wanted a valid integer",
    ),
    "a large number": (
        {"progress": PROGRESS | {"samples": 10**30}, "shards_sha256": ""},
        "progress.samples: found 10+, wanted less",
    ),
    "a negative number": (
        {"progress": PROGRESS | {"step": -1}, "shards_sha256": ""},
        "progress.step: found -1, wanted greater",
    ),
    "other skips": ({"progress": PROGRESS | {"skipped": [3]}}, "progress.skipped.0: found 3"),
    "other losses": (
        {"progress": PROGRESS | {"recent_losses": ["x"]}},
        "progress.recent_losses.0: found 'x', wanted a valid number",
    ),
    "another digest": ({"progress": PROGRESS, "shards_sha256": 3}, "shards_sha256: found 3"),
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_is_one_line(tmp_path: Path, name: str) -> None:
    state, message = STATES[name]
    path = save(tmp_path)
    assert SavedCheckpoint(path).state(TrainingState).progress.step == 3
    (path / STATE).write_text(json.dumps(state))
    mend_hashes(path)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: [^\n]*({message})[^\n]*$"):
        SavedCheckpoint(path).state(TrainingState)


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ([], "found .., wanted an object"),
        ({"format": "3"}, "format: found '3', wanted a valid integer"),
        ({"format": 3}, "files: found nothing"),
        ({"format": 3, "files": {}}, "files: found no state.json"),
        ({"format": 3, "files": {STATE: {"bytes": -1, "sha256": ""}}}, "bytes: found -1"),
        ({"format": 3, "files": {STATE: {"bytes": 1, "sha256": "x"}}}, "sha256: found 'x'"),
        (
            {"format": 3, "files": {n: {"bytes": 1, "sha256": "0" * 64} for n in (STATE, "../x")}},
            "files: found '../x', wanted state.json or a file of tensors",
        ),
    ],
)
def test_another_list_of_checksums_is_one_line(tmp_path: Path, listing: Any, message: str) -> None:
    path = save(tmp_path)
    (path / CHECKSUMS).write_text(json.dumps(listing))
    with pytest.raises(CheckpointError, match=f"is damaged: {CHECKSUMS}: .*{message}[^\n]*$"):
        SavedCheckpoint(path)


@pytest.mark.parametrize("name", [MODEL, STATE, CHECKSUMS])
def test_a_link_to_a_device_is_not_read_for_ever(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    for replace in (lambda: (path / name).symlink_to("/dev/zero"), lambda: os.mkfifo(path / name)):
        (path / name).unlink()
        replace()
        with pytest.raises(CheckpointError, match=f"{name}: found a .*, wanted a regular file"):
            SavedCheckpoint(path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("python", None, "rng/python: found nothing, wanted shape"),
        ("numpy", torch.zeros(3), r"rng/numpy: found shape \(3,\) of torch.float32, wanted"),
        ("python", torch.full((626,), -1), "rng: found no state of a generator: "),
        ("numpy", torch.full((625,), 1 << 40), "rng: found no state of a generator: "),
        ("torch", torch.full((5056,), 255, dtype=torch.uint8), "rng: found no state of a gen"),
    ],
)
def test_another_random_state_is_one_line(
    name: str, tensor: torch.Tensor | None, message: str
) -> None:
    state: dict[str, Any] = {**capture_rng(), name: tensor}
    with pytest.raises(CheckpointError, match=f"^{message}[^\n]*$"):
        restore_rng({key: value for key, value in state.items() if value is not None})


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_every_file_is_in_the_share_of_one_rank(count: int) -> None:
    sizes = {STATE: 0, **{f"model-{n:05d}-000.safetensors": (n * 7919) % 101 for n in range(20)}}
    sizes["rng-00019-000.safetensors"] = 0  # at the end of all bytes
    files = {name: _Checksum(size, "0" * 64) for name, size in sizes.items()}
    shares = [_share(files, rank, count) for rank in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    most = max(sum(sizes[name] for name in share) for share in shares)
    assert most <= sum(sizes.values()) / count + max(sizes.values())
