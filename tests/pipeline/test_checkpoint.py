import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longhaul.pipeline import checkpoint, checkpoint_files
from longhaul.pipeline.checkpoint import CheckpointError, CheckpointStore, newest_checkpoint

Tensors = dict[str, dict[str, Tensor]]


def _tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "model": {
            "embedding": weight,
            "head": weight,  # tied
            "transposed": weight.T,
            "half": weight.bfloat16(),
            "scalar": torch.tensor(float("nan")),
            "empty": torch.empty(0, 3),
        },
        "rng": {"torch": torch.arange(9, dtype=torch.uint8)},
    }


def _store(folder: Path, keep_last: int = 3, keep_every: int | None = None) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last=keep_last, keep_every=keep_every)


def _names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def _assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for group in wanted:
        assert found[group].keys() == wanted[group].keys()
        for name, tensor in wanted[group].items():
            other = found[group][name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor)]
            assert torch.equal(*bits), name


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    state = {"step": 12, "tokens": 10**13, "lr": 0.1 + 0.2, "nested": {"list": [1, None, "x"]}}
    path = _store(tmp_path).save(12, _tensors(), state)
    assert path.name == "step-000000012"
    tensors, loaded = CheckpointStore.load(path)
    _assert_equal(tensors, _tensors())
    assert loaded == state


def test_loading_one_group_does_not_read_the_others(tmp_path: Path) -> None:
    path = _store(tmp_path).save(1, _tensors(), {})
    (path / "rng.safetensors").unlink()
    tensors, _ = CheckpointStore.load(path, only=("model",))
    assert tensors.keys() == {"model"}
    with pytest.raises(CheckpointError, match=r"no optimizer\.safetensors"):
        CheckpointStore.load(path, only=("optimizer",))


def test_loaded_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = _store(tmp_path).save(1, _tensors(), {})
    tensors, _ = CheckpointStore.load(path)
    for file in path.iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    _assert_equal(tensors, _tensors())


def test_old_checkpoints_go_and_every_nth_stays(tmp_path: Path) -> None:
    store = _store(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        store.save(step, _tensors(), {})
    assert _names(store) == [f"step-{step:09d}" for step in (4, 8, 9, 10)]


def test_steps_beyond_nine_digits_are_newer_than_shorter_ones(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (999_999_999, 1_000_000_000):
        store.save(step, _tensors(), {})
    newest = store.newest()
    assert newest is not None
    assert newest.name == "step-1000000000"


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert _store(tmp_path).newest() is None


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "rng.safetensors", "state.json", "checksums.json"]
)
@pytest.mark.parametrize("damage", [_flip_a_byte, _truncate, Path.unlink])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Any
) -> None:
    store = _store(tmp_path)
    store.save(1, _tensors(1), {"step": 1})
    damaged = store.save(2, _tensors(2), {"step": 2})
    damage(damaged / file)
    with pytest.raises(CheckpointError, match=file):
        CheckpointStore.load(damaged)
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest == store.folder / "step-000000001"
    assert _names(store) == ["step-000000001", "step-000000002.damaged"]
    (warning,) = caplog.messages
    assert file in warning
    assert "step-000000002.damaged" in warning
    # The step can be saved again, and be damaged again, and nothing is deleted.
    damage(store.save(2, _tensors(2), {}) / file)
    assert store.newest() == newest
    assert _names(store)[-1] == "step-000000002.damaged-2"


def test_a_checkpoint_of_another_format_is_named_and_left_alone(tmp_path: Path) -> None:
    store = _store(tmp_path)
    path = store.save(1, _tensors(), {})
    listing = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({**listing, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        store.newest()
    assert _names(store) == ["step-000000001"]


def test_leftovers_of_an_interrupted_save_and_removal_are_deleted(tmp_path: Path) -> None:
    store = _store(tmp_path)
    whole = store.save(1, _tensors(), {})
    for leftover in (".saving-step-000000002", ".removing-step-000000000"):
        (store.folder / leftover).mkdir()
        (store.folder / leftover / "model.safetensors").write_bytes(b"half")
    assert store.newest() == whole
    assert _names(store) == [whole.name]


def test_looking_from_another_process_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path)
    assert newest_checkpoint(store.folder) is None
    whole = store.save(1, _tensors(), {})
    _truncate(store.save(2, _tensors(), {}) / "model.safetensors")
    (store.folder / ".saving-step-000000003").mkdir()
    before = _names(store)
    assert newest_checkpoint(store.folder) == whole
    assert _names(store) == before
    (warning,) = caplog.messages
    assert "step-000000002 is damaged" in warning


def test_saving_a_step_again_keeps_the_whole_checkpoint_and_replaces_a_damaged_one(
    tmp_path: Path,
) -> None:
    store = _store(tmp_path)
    path = store.save(1, _tensors(), {"attempt": 1})
    assert store.save(1, _tensors(), {"attempt": 2}) == path
    assert CheckpointStore.load(path)[1] == {"attempt": 1}
    _truncate(path / "model.safetensors")
    assert store.save(1, _tensors(), {"attempt": 3}) == path
    assert CheckpointStore.load(path)[1] == {"attempt": 3}


def test_what_does_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    store.save(1, _tensors(), {})
    real = checkpoint_files.save_file

    def lossy(tensors: dict[str, Tensor], path: Path) -> None:
        real({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, path)

    monkeypatch.setattr(checkpoint_files, "save_file", lossy)
    with pytest.raises(CheckpointError, match=r"step 2 .*does not read back"):
        store.save(2, _tensors(), {})
    assert _names(store) == ["step-000000001"]


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    before = store.save(1, _tensors(), {})
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError) as caught:
        store.save(2, _tensors(), {})
    message = str(caught.value)
    for part in ("step 2", str(store.folder), "bytes wanted", "1,000 bytes free"):
        assert part in message
    assert "\n" not in message
    assert _names(store) == [before.name]


# A limit on the size of a file stops a write midway as a full disk does, needs no mount, and stays
# in its own process.
FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from longhaul.pipeline.checkpoint import CheckpointError, CheckpointStore, newest_checkpoint

torch.set_num_threads(1)
store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
store.save(1, {"model": {"w": torch.ones(1000)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for state in ({}, {"text": "x" * 200_000}):
    size = 10 if state else 100_000
    try:
        store.save(2, {"model": {"w": torch.ones(size)}}, state)
    except CheckpointError as error:
        print(error)
"""


def test_a_disk_that_fills_up_midway_loses_only_the_new_checkpoint(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stdout + result.stderr
    for line in lines:
        assert line.startswith("checkpoint of step 2 could not be saved")
        assert "File too large" in line
        assert "bytes wanted" in line
    store = _store(tmp_path)
    assert _names(store) == ["step-000000001"]
    assert store.newest() is not None


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    # Permissions do not bind root, a file in the place of the folder binds everyone.
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved .*checkpoints"):
        _store(tmp_path).save(1, _tensors(), {})


READ_ONLY = """
import ctypes, os, sys
from pathlib import Path
import torch
from longhaul.pipeline.checkpoint import CheckpointError, CheckpointStore, newest_checkpoint

torch.set_num_threads(1)
store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
path = store.save(1, {"model": {"w": torch.ones(1000)}}, {})
os.chmod(store.folder, 0o555)
if os.getuid() == 0:
    # root ignores permissions, so the process becomes nobody.
    os.setgid(65534)
    os.setuid(65534)
try:
    store.save(2, {"model": {"w": torch.ones(1000)}}, {})
except CheckpointError as error:
    print(error)
print(store.newest())
"""


def test_a_read_only_folder_is_one_clear_line_and_the_old_checkpoint_loads(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)  # pytest keeps its folders to their owner
    result = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    (tmp_path / "checkpoints").chmod(0o755)
    assert result.returncode == 0, result.stderr
    error, newest = result.stdout.splitlines()
    assert "Permission denied" in error
    assert newest.endswith("step-000000001")
