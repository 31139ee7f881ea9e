"""Names the tensors of a model and its optimizer for a checkpoint, and restores them exactly.

The optimizer's state is keyed by parameter name, not by position in a list, and sharded tensors are
saved as DTensors. Therefore a checkpoint of one strategy can be restored under any other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of Adam's moments."""


def training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors, not copied, as `model/NAME` and `optimizer/NAME/KEY`."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = _parameter_names(model)
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            tensors[f"optimizer/{names[id(parameter)]}/{key}"] = value
    return tensors


def restore_training(model: nn.Module, optimizer: Optimizer, saved: SavedCheckpoint) -> None:
    """Read what `training_tensors` named, under whatever sharding this model has.

    Raises:
        CheckpointError: the checkpoint has other tensors than the model and this optimizer.
    """
    saved.check_group("model", model.state_dict())
    # Before reading, so that old and new moments are not in memory at the same time.
    optimizer.state.clear()
    into = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, entry in saved.tensors.items():
        # Parameter names contain dots, never a slash.
        group, _, rest = full_name.partition("/")
        if group != "optimizer":
            continue
        name, _, key = rest.partition("/")
        if name not in parameters:
            raise CheckpointError(
                f"checkpoint {saved.path}: found the optimizer's {rest}, wanted a parameter of "
                "this model"
            )
        parameter = parameters[name]
        dtype = entry.properties.dtype
        wanted = torch.Size() if key == "step" else parameter.shape
        if entry.size != wanted or not dtype.is_floating_point:
            raise CheckpointError(
                f"checkpoint {saved.path}: found shape {tuple(entry.size)} of {dtype} for "
                f"{full_name}, wanted {tuple(wanted)} of a floating-point type"
            )
        if key == "step":
            value = torch.zeros((), dtype=dtype, device=parameter.device)
        else:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        into[f"optimizer/{name}/{key}"] = states.setdefault(name, {})[key] = value
    _check_complete(saved, states, parameters, optimizer)
    saved.read(into)
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def _check_complete(
    saved: SavedCheckpoint,
    states: Mapping[str, Mapping[str, Tensor]],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
) -> None:
    """Raise where a parameter lacks what the next update would look for.

    That is what others of its group have: two groups may have states of different kinds.
    """
    group_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups = {name: group_of.get(id(parameters[name])) for name in states}
    wanted: dict[int | None, set[str]] = {}
    for name, state in states.items():
        wanted.setdefault(groups[name], set()).update(state)
    for keys in wanted.values():
        if isinstance(optimizer, Adam):  # AdamW is an Adam
            keys |= {"step", *MOMENTS}
    for name, state in states.items():
        for key in sorted(wanted[groups[name]] - state.keys()):
            raise CheckpointError(
                f"checkpoint {saved.path}: found no optimizer/{name}/{key}, wanted one"
            )


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Parameter names, keyed by id(parameter)."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
