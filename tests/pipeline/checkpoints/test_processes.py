"""Checkpoints written by processes that end, fail or share the work."""

import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore

Fork = Callable[..., Any]  # conftest.Command: modules of this folder cannot import each other


def _store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last=9)


def _names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


SCRIPT = """
import os, resource, sys, time
from pathlib import Path
import torch
from longhaul.pipeline.checkpoints import writer
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.store import CheckpointStore

torch.set_num_threads(1)
store = CheckpointStore(Path(sys.argv[1]), keep_last=1)

def save(step, size, state):
    store.start(step, {"model/w": torch.ones(size)}, state)
    store.wait()

save(1, 1000, {})
"""

# A limit on the size of a file stops a write midway as a full disk does, needs no mount, and stays
# in its own process.
FULL_DISK = (
    SCRIPT
    + """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for state in ({}, {"text": "x" * 200_000}):
    try:
        save(2, 10 if state else 100_000, state)
    except CheckpointError as error:
        print(error)
"""
)


def test_a_disk_that_fills_up_midway_loses_only_the_new_checkpoint(
    tmp_path: Path, fork: Fork
) -> None:
    process = fork(FULL_DISK, tmp_path, str(tmp_path / "checkpoints"))
    out, error = process.communicate()
    lines = out.splitlines()
    assert len(lines) == 2, out + error
    for line in lines:
        assert line.startswith("checkpoint of step 2 could not be saved")
        assert "File too large" in line
    store = _store(tmp_path)
    assert _names(store) == ["step-000000001"]
    assert store.open_newest() is not None


# Both files of the second checkpoint are on disk, the second in part.
CRASH = (
    SCRIPT
    + """
real = writer.save_file

def crash(tensors, path, metadata):
    if path.name.startswith("optimizer"):
        path.write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)
    real(tensors, path, metadata)

writer.save_file = crash
store.start(2, {"model/w": torch.ones(10), "optimizer/w/m": torch.ones(10)}, {})
print("training", flush=True)
store.wait()
"""
)


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path, fork: Fork) -> None:
    process = fork(CRASH, tmp_path, str(tmp_path / "checkpoints"))
    store = _store(tmp_path)
    half = store.folder / ".saving-step-000000002" / "optimizer-00000-000.safetensors"
    deadline = time.monotonic() + 60
    while not (half.exists() and half.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert _names(store) == [".saving-step-000000002", "step-000000001"]
    newest = store.open_newest()
    assert newest is not None
    assert torch.equal(newest.read_one("model/w"), torch.ones(1000))
    assert _names(store) == ["step-000000001"]


# Parameters of fewer rows than ranks, or of rows that do not divide, leave ranks without a part and
# with parts of two sizes.
TWO_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from longhaul.pipeline.checkpoints import integrity, planner, writer
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
group = dist.new_group(backend="gloo")

def sharded(rows, columns, start):
    whole = torch.arange(start, start + rows * columns).reshape(rows, columns)
    return distribute_tensor(whole.float(), mesh, [Shard(0)])

tensors = {"model/one": sharded(1, 5, 0), "model/three": sharded(3, 5, 10)}
tensors["optimizer/three/exp_avg"] = sharded(3, 5, 50).bfloat16()
tensors["optimizer/three/step"] = torch.tensor(7.0)
if rank == 0:
    tensors["rng/torch"] = torch.arange(4, dtype=torch.uint8)

planned, share_out = [], planner.share_out

def noting(shards):
    planned.append([len(own) for own in shards])
    return share_out(shards)

planner.share_out = noting
store = CheckpointStore(folder / "checkpoints", keep_last=9, group=group)
store.start(2, tensors, {"rank": rank})
store.wait()

headers, read_header = [], integrity.read_header

def noting_header(path):
    headers.append(path.name)
    return read_header(path)

integrity.read_header = noting_header
assert store.open_newest().path.name == "step-000000002"
# Each rank has read the headers of its own files only.
assert headers and all(f"-{rank:05d}-" in name for name in headers), headers
integrity.read_header = read_header

for step in (1, 2):
    saved = SavedCheckpoint(store.folder / f"step-{step:09d}", rank_group=group)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    saved.read(into)
    for name, tensor in into.items():
        here, wanted = (getattr(t, "to_local", lambda: t)() for t in (tensor, tensors[name]))
        assert torch.equal(here, wanted), (step, name, here)

# One rank's failure is everyone's.
real = writer.save_file

def lossy(tensors, path, metadata):
    real({name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}, path, metadata)

if rank == 1:
    writer.save_file = lossy
store.start(3, tensors, {})
try:
    store.wait()
except CheckpointError as error:
    print(error)
writer.save_file = real
store.start(4, tensors, {})
store.wait()
if rank == 1:  # The plan of one rank is another.
    tensors["model/last"] = torch.tensor([4.0])
store.start(5, tensors, {})
store.wait()
print(planned)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_and_one_read_what_either_has_written(tmp_path: Path, fork: Fork) -> None:
    wanted = {
        "model/one": torch.arange(5.0).reshape(1, 5),
        "model/three": torch.arange(10.0, 25.0).reshape(3, 5),
        "optimizer/three/exp_avg": torch.arange(50.0, 65.0).reshape(3, 5).bfloat16(),
        "optimizer/three/step": torch.tensor(7.0),
        "rng/torch": torch.arange(4, dtype=torch.uint8),
    }
    store = _store(tmp_path)
    store.start(1, wanted, {})
    store.wait()
    ranks = [fork(TWO_RANKS, tmp_path, str(rank), str(tmp_path)) for rank in range(2)]
    for rank, planned in zip(ranks, ([[5, 4], [5, 5]], []), strict=True):
        out, error = rank.communicate(timeout=60)
        assert rank.returncode == 0, f"{out}\n{error}"
        assert out.endswith(f"\n{planned}\n"), out
        assert out.startswith("checkpoint of step 3 could not be saved"), out
        assert "rank 1: model-00001-000.safetensors does not read back" in out
    assert _names(store) == [f"step-{step:09d}" for step in (1, 2, 4, 5)]
    path = store.folder / "step-000000002"
    assert {file.name for file in path.glob("model-*")} == {
        f"model-{rank:05d}-000.safetensors" for rank in range(2)
    }
    saved = SavedCheckpoint(path)
    assert saved.tensors.keys() == wanted.keys()
    found = {name: saved.read_one(name) for name in wanted}
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert saved.state(dict[str, int]) == {"rank": 0}
    wanted["model/last"] = torch.tensor([4.0])
    last = SavedCheckpoint(store.path_of(5))
    found = {name: last.read_one(name) for name in last.tensors}
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


READ_ONLY = (
    SCRIPT
    + """
os.chmod(store.folder, 0o555)
if os.getuid() == 0:
    # root ignores permissions, so the process becomes nobody.
    os.setgid(65534)
    os.setuid(65534)
try:
    save(2, 1000, {})
except CheckpointError as error:
    print(error)
print(store.open_newest().path)
"""
)


def test_a_read_only_folder_is_one_clear_line_and_the_old_checkpoint_loads(
    tmp_path: Path, fork: Fork
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)  # pytest keeps its folders to their owner
    process = fork(READ_ONLY, tmp_path, str(tmp_path / "checkpoints"))
    out, failure = process.communicate()
    (tmp_path / "checkpoints").chmod(0o755)
    assert process.returncode == 0, failure
    error, newest = out.splitlines()
    assert "Permission denied" in error
    assert newest.endswith("step-000000001")


THREE_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from longhaul.pipeline.checkpoints import integrity
from longhaul.pipeline.checkpoints.store import CheckpointStore

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
group = dist.new_group(backend="gloo")
store = CheckpointStore(folder / "checkpoints", keep_last=9, group=group)
for step in (1, 2):
    whole = torch.full((6, 500), float(step))
    store.start(step, {"model/w": distribute_tensor(whole, mesh, [Shard(0)])}, {})
    store.wait()

hashed, sha256_of = [], integrity.sha256_of

def noting(path):
    hashed.append(path.name)
    return sha256_of(path)

integrity.sha256_of = noting

def say_newest():
    try:
        print("newest", store.open_newest().path.name)
    except OSError as error:
        print("error", error)
    dist.barrier(group)

say_newest()
print("hashed", *sorted(hashed))
newest = folder / "checkpoints" / "step-000000002"
saved, into = store.open_newest(), distribute_tensor(torch.zeros(6, 500), mesh, [Shard(0)])
saved.read({"model/w": into})
print("read", into.full_tensor().unique().tolist())
if rank == 0:
    for number in (1, 2):
        file = newest / f"model-{number:05d}-000.safetensors"
        file.rename(file.with_suffix(".gone"))
dist.barrier(group)
try:
    saved.read({"model/w": into})
except OSError as error:
    print(error)
dist.barrier(group)
if rank == 0:
    for file in newest.glob("*.gone"):
        file.rename(file.with_suffix(".safetensors"))
dist.barrier(group)
for damaged in (newest, newest.with_name("step-000000001")):
    if rank == 0:
        # Two files, of which the one that is listed first is to be named.
        for number in (1, 2):
            file = damaged / f"model-{number:05d}-000.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
    dist.barrier(group)
    say_newest()
dist.barrier()
dist.destroy_process_group()
"""


def test_each_rank_hashes_a_share_and_all_notice_what_one_cannot_read(
    tmp_path: Path, fork: Fork
) -> None:
    ranks = [fork(THREE_RANKS, tmp_path, str(rank), str(tmp_path)) for rank in range(3)]
    warnings = []
    for number, rank in enumerate(ranks):
        out, error = rank.communicate(timeout=60)
        assert rank.returncode == 0, f"{out}\n{error}"
        own = f"model-{number:05d}-000.safetensors"
        *lines, last = out.splitlines()
        unread = lines.pop(3)
        assert "step-000000002 cannot be read: rank 1: " in unread
        assert "model-00001-000.safetensors" in unread
        assert lines == [
            "newest step-000000002",
            f"hashed {own}{' state.json' if number == 0 else ''}",
            "read [2.0]",
            "newest step-000000001",
        ]
        assert last.startswith(f"error {tmp_path / 'checkpoints'}: found only damaged checkpoints")
        warnings.append([line for line in error.splitlines() if "set aside" in line])
    for warning, step in zip(warnings[0], ("step-000000002", "step-000000001"), strict=True):
        assert f"{step} is damaged: model-00001-000.safetensors: found sha256" in warning
    assert warnings[1:] == [[], []]
    damaged = [f"step-{step:09d}.damaged" for step in (1, 2)]
    assert _names(_store(tmp_path)) == damaged
