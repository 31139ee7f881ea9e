"""A checkpoint whose tensors are made one after another, as an import and an average do."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longhaul.pipeline.checkpoints import writer
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore


def test_tensors_in_turn_are_a_checkpoint_and_few_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MAX_BYTES_IN_TURN", 200)
    wanted = {f"model/{n}": torch.full((5, n + 1), float(n)) for n in range(12)}
    given: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in wanted.items():
            held = sum(one.nbytes for ref in given if (one := ref()) is not None)
            assert held <= 200 + 5 * 4 * 12
            copy = tensor.T.contiguous().T
            given.append(weakref.ref(copy))
            yield name, copy

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3, keep_every=None)
    path = store.write(7, 2000, tensors(), {"a": 1})
    assert path == tmp_path / "checkpoints" / "step-000000007"
    assert len(list(path.glob("model-*"))) > 4
    assert SavedCheckpoint(path).state(dict[str, int]) == {"a": 1}
    found = SavedCheckpoint(path).read_group("model")
    assert found.keys() == {name.removeprefix("model/") for name in wanted}
    assert all(torch.equal(found[name.removeprefix("model/")], wanted[name]) for name in wanted)
