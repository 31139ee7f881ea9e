"""The state of an optimizer as named tensors and plain JSON, and back, to the bit.

Entries are keyed by the parameter's own name, not by its place in a list, through torch's
distributed state dict functions: the same file can be read under another strategy.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

_STATE = "state"
_GROUP = "group"


def optimizer_tensors(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of an optimizer, and the rest as JSON.

    Returns:
        Tensors named `state/PARAMETER/KEY` and `group/INDEX/KEY`, not copied; and
        `{"groups": [...], "state": {PARAMETER: {KEY: number}}}` for what is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    if optimizer.state:
        full: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        for parameter, entries in full["state"].items():
            rest[parameter] = {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{_STATE}/{parameter}/{key}"] = value
                else:
                    rest[parameter][key] = value
        groups: list[dict[str, Any]] = full["param_groups"]
    else:
        # Before the first step torch's function would make a state by stepping once with zero
        # gradients; restored, such an optimizer would believe it had already made a step.
        names = _parameter_names(model)
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    plain_groups: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        plain_groups.append({})
        for key, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"{_GROUP}/{index}/{key}"] = value
            else:
                plain_groups[index][key] = value
    return tensors, {"groups": plain_groups, "state": rest}


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Put back what `optimizer_tensors` returned, learning rates and betas included.

    Raises:
        ValueError: the optimizer's groups hold other parameters than the saved ones.
    """
    names = _parameter_names(model)
    groups = [dict(group) for group in rest["groups"]]
    for index, current in enumerate(optimizer.param_groups):
        found = [names[id(parameter)] for parameter in current["params"]]
        saved = groups[index]["params"] if index < len(groups) else []
        if sorted(saved) != sorted(found):
            differing = sorted(set(saved) ^ set(found))
            raise ValueError(
                f"optimizer group {index} of the checkpoint holds {len(saved)} parameters, this "
                f"model's holds {len(found)}; only in one of them: {', '.join(differing[:3])}"
            )
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has {len(groups)} optimizer groups, "
            f"this model's optimizer has {len(optimizer.param_groups)}"
        )
    state: dict[str, dict[str, Any]] = {
        name: dict(entries) for name, entries in rest["state"].items()
    }
    for name, tensor in tensors.items():
        # Parameter names hold dots, never a slash.
        where, owner, key = name.split("/")
        if where == _STATE:
            state[owner][key] = tensor
        else:
            groups[int(owner)][key] = tensor
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        for key, value in group.items():
            if isinstance(current.get(key), tuple):
                group[key] = tuple(value)  # JSON made a list of it.
    if state:
        # Not strict: a parameter that never had a gradient has no state, before and after.
        set_optimizer_state_dict(
            model,
            optimizer,
            cast(dict[str, Any], {"state": state, "param_groups": groups}),
            options=StateDictOptions(strict=False),
        )
    else:
        optimizer.state.clear()
        for group, current in zip(groups, optimizer.param_groups, strict=True):
            current.update({key: value for key, value in group.items() if key != "params"})


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Names by identity, the same whether or not the model is compiled."""
    return {
        id(parameter): name.replace("_orig_mod.", "")
        for name, parameter in model.named_parameters()
    }
