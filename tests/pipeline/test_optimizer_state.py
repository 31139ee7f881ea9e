import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from longhaul.pipeline.optimizer_state import optimizer_tensors, restore_optimizer


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


def _groups(model: _Model) -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.unused, model.frozen], "weight_decay": 0.1},
        {"params": [model.first.bias, *model.second.parameters()], "lr": 0.03},
    ]


OPTIMIZERS: dict[str, Callable[[_Model], Optimizer]] = {
    "adam": lambda model: Adam(_groups(model), lr=0.1, betas=(0.9, 0.95)),
    "adamw": lambda model: AdamW(_groups(model), lr=0.1, fused=True),
    "capturable": lambda model: Adam(_groups(model), lr=torch.tensor(0.1), amsgrad=True),
    "momentum": lambda model: SGD(_groups(model), lr=0.1, momentum=0.9),
    "stateless": lambda model: SGD(_groups(model), lr=0.1),
}


def _train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def _save(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, rest = optimizer_tensors(model, optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(rest))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_to_the_bit(kind: str, steps: int) -> None:
    model = _Model()
    optimizer = OPTIMIZERS[kind](model)
    _train(model, optimizer, steps)
    tensors, rest = _save(model, optimizer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    never_saved = _Model()
    _train(never_saved, OPTIMIZERS[kind](never_saved), steps + 3)

    resumed = _Model()
    resumed.load_state_dict(weights)
    other = OPTIMIZERS[kind](resumed)
    restore_optimizer(resumed, other, tensors, rest)
    again, rest_again = _save(resumed, other)
    assert rest_again == rest
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    for before, after in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {**after, "params": 0} == {**before, "params": 0}
    _train(model, optimizer, 3, first=steps)
    _train(resumed, other, 3, first=steps)
    for name, tensor in never_saved.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_restoring_changes_no_weight() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adamw"](model)
    _train(model, optimizer, 2)
    tensors, rest = _save(model, optimizer)
    resumed = _Model()
    resumed.load_state_dict(model.state_dict())
    restore_optimizer(resumed, OPTIMIZERS["adamw"](resumed), tensors, rest)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_entries_are_named_after_parameters() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 1)
    tensors, rest = _save(model, optimizer)
    assert "state/second.weight/exp_avg_sq" in tensors
    assert rest["groups"][1]["params"] == ["first.bias", "second.weight", "second.bias"]
    assert not any("unused" in name or "frozen" in name for name in tensors)


def test_a_compiled_model_reads_the_state_of_a_plain_one() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 2)
    tensors, rest = _save(model, optimizer)
    resumed = _Model()
    other = OPTIMIZERS["adam"](resumed)
    restore_optimizer(torch.compile(resumed), other, tensors, rest)  # type: ignore[arg-type]
    again, rest_again = _save(torch.compile(resumed), other)  # type: ignore[arg-type]
    assert rest_again == rest
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_another_models_state_is_refused_by_name() -> None:
    model = _Model()
    optimizer = OPTIMIZERS["adam"](model)
    _train(model, optimizer, 1)
    tensors, rest = _save(model, optimizer)
    other = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(ValueError, match=r"group 0 .* holds 3 parameters.*holds 2"):
        restore_optimizer(other, Adam(other.parameters()), tensors, rest)
