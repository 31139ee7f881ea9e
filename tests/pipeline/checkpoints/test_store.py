"""Checkpoints of one process: each is whole, or not there."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longhaul.pipeline.checkpoints import store as store_module
from longhaul.pipeline.checkpoints import writer
from longhaul.pipeline.checkpoints.folders import holds_none, newest_checkpoint, newest_step
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "model/embedding": weight,
        "model/head": weight,  # tied
        "model/transposed": weight.T,
        "model/half": weight.bfloat16(),
        "model/scalar": torch.tensor(float("nan")),
        "model/empty": torch.empty(0, 3),
        "optimizer/head/exp_avg": weight.exp(),
        "rng/torch": torch.arange(9, dtype=torch.uint8),
    }


def _store(folder: Path, keep_last: int = 3, keep_every: int | None = None) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last=keep_last, keep_every=keep_every)


def _save(
    store: CheckpointStore,
    step: int,
    tensors: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    path = store.start(step, _tensors() if tensors is None else tensors, state or {})
    store.wait()
    return path


def _load(path: Path) -> dict[str, Tensor]:
    saved = SavedCheckpoint(path)
    groups = {name.partition("/")[0] for name in saved.tensors}
    return {f"{g}/{name}": t for g in groups for name, t in saved.read_group(g).items()}


def _names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("longhaul")]


def _assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor)]
        assert torch.equal(*bits), name


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    state = {"step": 12, "tokens": 10**13, "lr": 0.1 + 0.2, "nested": {"list": [1, None, "x"]}}
    path = _save(_store(tmp_path), 12, _tensors(), state)
    assert path.name == "step-000000012"
    assert sorted(file.name for file in path.iterdir()) == [
        "checksums.json",
        "model-00000-000.safetensors",
        "optimizer-00000-000.safetensors",
        "rng-00000-000.safetensors",
        "state.json",
    ]
    assert SavedCheckpoint(path).state(dict[str, Any]) == state
    _assert_equal(_load(path), _tensors())
    _assert_equal(
        {"model/half": SavedCheckpoint(path).read_one("model/half")},
        {"model/half": _tensors()["model/half"]},
    )


def test_files_follow_the_umask(tmp_path: Path) -> None:
    path = _save(_store(tmp_path), 1)
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}


def test_files_hold_no_more_than_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MAX_FILE_BYTES", 100)
    sizes = [20, 5, 1, 99, 5]  # float32: a file has room for 25, and for one tensor of any size
    tensors = {f"model/{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}
    path = _save(_store(tmp_path), 1, tensors)
    held = []
    for number in range(4):
        with safe_open(path / f"model-00000-{number:03d}.safetensors", "pt") as file:
            held.append(sorted(file.keys()))
    assert held == [["model/0", "model/1"], ["model/2"], ["model/3"], ["model/4"]]
    assert len(list(path.iterdir())) == 4 + 2
    _assert_equal(_load(path), tensors)


def test_reading_one_group_does_not_touch_the_others(tmp_path: Path) -> None:
    path = _save(_store(tmp_path), 1)
    (path / "rng-00000-000.safetensors").unlink()
    (path / "optimizer-00000-000.safetensors").unlink()
    tensors = SavedCheckpoint(path, "model").read_group("model")
    wanted = {name: tensor for name, tensor in _tensors().items() if name.startswith("model/")}
    _assert_equal({f"model/{name}": tensor for name, tensor in tensors.items()}, wanted)
    with pytest.raises(CheckpointError, match="optimizer-00000-000"):
        SavedCheckpoint(path, "model", "optimizer")
    with pytest.raises(CheckpointError, match=r"has no other$"):
        SavedCheckpoint(path, "model", "other")


def test_reading_fills_the_tensors_that_are_given(tmp_path: Path) -> None:
    saved = SavedCheckpoint(_save(_store(tmp_path), 1))
    given = torch.zeros(7, 5)
    saved.read({"model/embedding": given})
    assert torch.equal(given, _tensors()["model/embedding"])
    with pytest.raises(
        CheckpointError, match=r"shape \(7, 5\) for model/head, wanted shape \(5,\)"
    ):
        saved.read({"model/head": torch.zeros(5)})
    with pytest.raises(CheckpointError, match=r"found nothing for model/x, wanted shape \(5,\)"):
        saved.read({"model/x": torch.zeros(5)})


def test_loaded_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = _save(_store(tmp_path), 1)
    tensors = _load(path)
    for file in path.iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    _assert_equal(tensors, _tensors())


class _Gate:
    """Holds back the first tensors' file until it is opened, as a slow disk would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = writer.save_file

        def slow(*args: Any, **rest: Any) -> None:
            self.reached.set()
            assert self._open.wait(30)
            real(*args, **rest)

        monkeypatch.setattr(writer, "save_file", slow)

    def open(self) -> None:
        self._open.set()


def test_what_changes_while_it_is_written_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = _Gate(monkeypatch), _store(tmp_path)
    tensors, state = _tensors(), {"list": [1]}
    path = store.start(1, tensors, state)
    assert gate.reached.wait(30)
    assert store.is_saving
    assert not store.has_failed
    assert newest_checkpoint(store.folder) is None
    for tensor in tensors.values():
        tensor.zero_()
    state["list"].append(2)
    gate.open()
    store.wait()
    assert not store.is_saving
    _assert_equal(_load(path), _tensors())
    assert SavedCheckpoint(path).state(dict[str, Any]) == {"list": [1]}


def test_memory_that_cannot_be_page_locked_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stage(tensors: Any) -> None:
        raise RuntimeError("CUDA error: part or all of the memory is registered already")

    store = _store(tmp_path)
    store._is_pinned = True
    monkeypatch.setattr(store._stager, "stage", stage)
    for step in (1, 2):
        _assert_equal(_load(_save(store, step, _tensors(step))), _tensors(step))
    (warning,) = _warnings(caplog)
    assert "without page-locked memory: CUDA error" in warning


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, store = _Gate(monkeypatch), _store(tmp_path)
    store.start(1, _tensors(1), {})
    assert gate.reached.wait(30)
    second = threading.Thread(target=store.start, args=(2, _tensors(2), {}), daemon=True)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.open()
    second.join(30)
    assert not second.is_alive()
    store.wait()
    assert _names(store) == ["step-000000001", "step-000000002"]
    _assert_equal(_load(store.folder / "step-000000001"), _tensors(1))
    _assert_equal(_load(store.folder / "step-000000002"), _tensors(2))


def test_waiting_for_nothing_is_no_error(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.wait()
    assert (store.is_saving, store.has_failed) == (False, False)


def _newest(store: CheckpointStore) -> Path:
    saved = store.open_newest()
    assert saved is not None
    return saved.path


def test_old_checkpoints_go_and_every_nth_stays(tmp_path: Path) -> None:
    store = _store(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        _save(store, step)
    assert _names(store) == [f"step-{step:09d}" for step in (4, 8, 9, 10)]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, os.mkfifo])
def test_what_has_the_name_of_a_later_step_costs_no_checkpoint(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    store = _store(tmp_path, keep_last=1)
    _save(store, 1)
    make(store.folder / "step-999999999")
    path = _save(store, 2)
    assert _names(store) == ["step-000000002", "step-999999999"]
    assert newest_step(store.folder) == 2
    assert _newest(store) == path


@pytest.mark.parametrize("name", ["step-000000002", ".saving-step-000000002", ".removing-a"])
@pytest.mark.parametrize(
    "make",
    [Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")],
    ids=["folder", "file", "FIFO", "link"],
)
def test_a_save_goes_on_whatever_has_its_names(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    make(store.folder / name)
    _assert_equal(_load(_save(store, 2)), _load(store.path_of(1)))
    assert {*_names(store)} <= {"step-000000001", "step-000000002", "step-000000002.damaged"}


def test_a_checkpoint_of_another_format_is_set_aside_where_one_is_saved(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.path_of(1).mkdir(parents=True)
    (store.path_of(1) / "checksums.json").write_text('{"format": 99}')
    _save(store, 1)
    assert _names(store) == ["step-000000001", "step-000000001.damaged"]


def test_what_appears_during_a_save_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    write = store_module.write_state_and_checksums

    def drop(*arguments: Any) -> None:
        write(*arguments)
        store.path_of(1).touch()

    monkeypatch.setattr(store_module, "write_state_and_checksums", drop)
    _load(_save(store, 1))
    assert _names(store) == ["step-000000001", "step-000000001.damaged"]


def test_notes_in_the_folder_are_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-notes.txt").touch()
    assert holds_none(folder)
    (folder / "step-000000001.damaged").mkdir()
    assert not holds_none(folder)


def test_steps_beyond_nine_digits_are_newer_than_shorter_ones(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (999_999_999, 1_000_000_000):
        _save(store, step)
    assert _newest(store).name == "step-1000000000"


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert _store(tmp_path).open_newest() is None


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "file",
    ["model-00000-000.safetensors", "rng-00000-000.safetensors", "state.json", "checksums.json"],
)
@pytest.mark.parametrize("damage", [_flip_a_byte, _truncate, Path.unlink])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Any
) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    damaged = _save(store, 2)
    damage(damaged / file)
    with pytest.raises(CheckpointError, match=file):
        SavedCheckpoint(damaged)
    with caplog.at_level(logging.WARNING):
        newest = _newest(store)
    assert newest == store.folder / "step-000000001"
    assert _names(store) == ["step-000000001", "step-000000002.damaged"]
    (warning,) = _warnings(caplog)
    assert file in warning
    assert "step-000000002.damaged" in warning
    # The step can be saved again, and be damaged again, and nothing is deleted.
    damage(_save(store, 2) / file)
    assert _newest(store) == newest
    assert _names(store)[-1] == "step-000000002.damaged-2"


def test_damaged_checkpoints_alone_are_an_error(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _truncate(_save(store, 1) / "model-00000-000.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="only damaged checkpoints, wanted an intact one"):
            store.open_newest()
    assert _names(store) == ["step-000000001.damaged"]


def test_a_checkpoint_of_another_format_is_named_and_left_alone(tmp_path: Path) -> None:
    store = _store(tmp_path)
    path = _save(store, 1)
    listing = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({**listing, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        store.open_newest()
    assert _names(store) == ["step-000000001"]


def test_leftovers_of_an_interrupted_save_and_removal_are_deleted(tmp_path: Path) -> None:
    store = _store(tmp_path)
    whole = _save(store, 1)
    for leftover in (".saving-step-000000002", ".removing-step-000000000"):
        (store.folder / leftover).mkdir()
        (store.folder / leftover / "model-00000-000.safetensors").write_bytes(b"half")
    assert _newest(store) == whole
    assert _names(store) == [whole.name]


def test_looking_from_another_process_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path)
    assert newest_checkpoint(store.folder) is None
    whole = _save(store, 1)
    _truncate(_save(store, 2) / "model-00000-000.safetensors")
    (store.folder / ".saving-step-000000003").mkdir()
    before = _names(store)
    assert newest_checkpoint(store.folder) == whole
    assert _names(store) == before
    (warning,) = _warnings(caplog)
    assert "step-000000002 is damaged" in warning


def test_saving_a_step_again_keeps_the_whole_checkpoint_and_replaces_a_damaged_one(
    tmp_path: Path,
) -> None:
    store = _store(tmp_path)
    path = _save(store, 1, state={"attempt": 1})
    assert _save(store, 1, state={"attempt": 2}) == path
    assert SavedCheckpoint(path).state(dict[str, Any]) == {"attempt": 1}
    _truncate(path / "model-00000-000.safetensors")
    assert _save(store, 1, state={"attempt": 3}) == path
    assert SavedCheckpoint(path).state(dict[str, Any]) == {"attempt": 3}


def _lossy(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Files lose their content on the way to the disk, until what this returns is called."""
    real = writer.save_file

    def save(tensors: dict[str, Tensor], path: Path, **rest: Any) -> None:
        real({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, path, **rest)

    monkeypatch.setattr(writer, "save_file", save)
    return lambda: monkeypatch.setattr(writer, "save_file", real)


def test_what_does_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    _lossy(monkeypatch)
    store.start(2, _tensors(), {})
    with pytest.raises(CheckpointError, match=r"step 2 .*does not read back"):
        store.wait()
    assert _names(store) == ["step-000000001"]


def test_a_failure_is_raised_once_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    mend = _lossy(monkeypatch)
    store.start(1, _tensors(), {})
    deadline = time.monotonic() + 30
    while not store.has_failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not store.is_saving
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        store.start(2, _tensors(), {})
    assert not store.has_failed
    assert _names(store) == []
    mend()
    _save(store, 2)
    assert _names(store) == ["step-000000002"]


def test_what_cannot_be_in_a_state_is_refused_at_once(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        store.start(1, _tensors(), {"set": {1}})
    _save(store, 1)


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    before = _save(store, 1)
    usage = store_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError) as caught:
        _save(store, 2)
    message = str(caught.value)
    for part in ("step 2", str(store.folder), "bytes wanted", "1,000 bytes free"):
        assert part in message
    assert "\n" not in message
    assert _names(store) == [before.name]


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    # Permissions do not bind root, a file in the place of the folder binds everyone.
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved .*checkpoints") as caught:
        _save(_store(tmp_path), 1)
    assert "\n" not in str(caught.value)
