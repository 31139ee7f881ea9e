import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from longhaul.modules.muon import Muon
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.optimizer_state import restore_training, training_tensors
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x) + self.tied(x)))


def _groups(model: _Model, first: str = "adam") -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.unused], "kind": first, "rows": [(3, 5), (3,)]},
        {"params": [model.first.bias, *model.second.parameters()], "kind": "adam"},
    ]


OPTIMIZERS: dict[str, Callable[[_Model], Optimizer]] = {
    "adam": lambda model: Adam(_groups(model), lr=0.1, betas=(0.9, 0.95)),
    "adamw": lambda model: AdamW(_groups(model), lr=0.1, weight_decay=0.1, fused=True),
    "muon": lambda model: Muon(_groups(model, "muon"), lr=0.1, betas=(0.9, 0.95), eps=1e-8),
}


def _train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    """Updates at a learning rate that follows from the step, as a run's does."""
    for step in range(first, first + steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for group, start in zip(optimizer.param_groups, (0.1, 0.03), strict=True):
            group["lr"] = start * 0.9**step
        optimizer.step()


def _save(folder: Path, model: nn.Module, optimizer: Optimizer) -> SavedCheckpoint:
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    path = store.start(1, training_tensors(model, optimizer), {})
    store.wait()
    return SavedCheckpoint(path)


def _other_weights() -> _Model:
    model = _Model()
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_to_the_bit(kind: str, steps: int, tmp_path: Path) -> None:
    model = _Model()
    optimizer = OPTIMIZERS[kind](model)
    _train(model, optimizer, steps)
    saved = _save(tmp_path, model, optimizer)
    never_saved = _Model()
    _train(never_saved, OPTIMIZERS[kind](never_saved), steps + 3)

    resumed = _other_weights()
    other = OPTIMIZERS[kind](resumed)
    _train(resumed, other, 1)  # leaves moments that must go
    restore_training(resumed, other, saved)
    again, before = training_tensors(resumed, other), training_tensors(model, optimizer)
    assert again.keys() == before.keys() == saved.tensors.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)
    assert all(again[name].dtype == before[name].dtype for name in before)
    _train(model, optimizer, 3, first=steps)
    _train(resumed, other, 3, first=steps)
    for name, tensor in never_saved.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_what_is_saved_is_not_copied() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 1)
    tensors = training_tensors(model, optimizer)
    assert tensors["model/first.weight"].data_ptr() == model.first.weight.data_ptr()
    moment = optimizer.state[model.first.weight]["exp_avg"]
    assert tensors["optimizer/first.weight/exp_avg"] is moment


def test_entries_are_named_after_parameters() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 1)
    names = training_tensors(model, optimizer).keys()
    trained = {"first.weight", "first.bias", "second.weight", "second.bias"}
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert {name for name in names if name.startswith("optimizer/")} == {
        f"optimizer/{name}/{key}" for name in trained for key in moments
    }
    assert {name for name in names if name.startswith("model/")} == {
        f"model/{name}" for name in (*trained, "tied.weight", "unused", "frozen")
    }


def test_another_models_state_is_refused_by_name(tmp_path: Path) -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    saved = _save(tmp_path / "new", model, optimizer)
    other = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(CheckpointError, match=r"found nothing for model/0\.bias, wanted shape"):
        restore_training(other, Adam([{"params": other.parameters(), "kind": "adam"}]), saved)


HOSTILE = {
    "found shape (2,) for model/extra, wanted nothing": {"model/extra": torch.zeros(2)},
    "found nothing for model/frozen, wanted shape (3,)": {"model/frozen": None},
    "found torch.int32 for model/frozen, wanted a floating": {
        "model/frozen": torch.zeros(3, dtype=torch.int32)
    },
    "found no optimizer/second.bias/exp_avg_sq, wanted one": {
        "optimizer/second.bias/exp_avg_sq": None
    },
    "found no optimizer/first.bias/exp_avg, wanted one": {
        f"optimizer/{name}/exp_avg": None
        for name in ("first.weight", "first.bias", "second.weight", "second.bias")
    },
    "found optimizer/first.bias/momentum, wanted none": {
        "optimizer/first.bias/momentum": torch.zeros(8)
    },
    "found optimizer/frozen/step, wanted none": {"optimizer/frozen/step": torch.zeros(())},
    "found shape (4,) of torch.float32 for optimizer/second.bias/step, wanted () of": {
        "optimizer/second.bias/step": torch.zeros(4)
    },
    "found shape (1, 4) of torch.float32 for optimizer/second.bias/exp_avg, wanted (4,)": {
        "optimizer/second.bias/exp_avg": torch.zeros(1, 4)
    },
    "found the optimizer's other.bias/step, wanted a parameter of this model": {
        "optimizer/other.bias/step": torch.zeros(())
    },
}


@pytest.mark.parametrize("message", HOSTILE)
def test_tensors_that_are_not_those_of_this_training_are_refused(
    tmp_path: Path, message: str
) -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 1)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    tensors: dict[str, Any] = {**training_tensors(model, optimizer), **HOSTILE[message]}
    path = store.start(1, {name: t for name, t in tensors.items() if t is not None}, {})
    store.wait()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        restore_training(model, optimizer, SavedCheckpoint(path))
