"""Names the tensors of a model and its optimizer for a checkpoint, and restores them exactly.

The optimizer's state is keyed by parameter name, not by position in a list, and sharded tensors are
saved as DTensors. Therefore a checkpoint of one strategy can be restored under any other.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longhaul.modules.optim import state_keys
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint


def training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors, not copied, as `model/NAME` and `optimizer/NAME/KEY`."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
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
    keys_of = {
        id(p): state_keys(group) for group in optimizer.param_groups for p in group["params"]
    }
    found: dict[str, set[str]] = {}
    for full_name in saved.tensors:
        # Parameter names contain dots, never a slash.
        kind, _, rest = full_name.partition("/")
        if kind == "optimizer":
            name, _, key = rest.partition("/")
            found.setdefault(name, set()).add(key)
    states: dict[str, dict[str, Tensor]] = {}
    # A parameter has no state before its first update.
    for name, keys in found.items():
        if name not in parameters:
            raise CheckpointError(
                f"checkpoint {saved.path}: found the optimizer's {name}/{min(keys)}, wanted a "
                "parameter of this model"
            )
        wanted = keys_of.get(id(parameters[name]), ())
        for key in sorted(keys.symmetric_difference(wanted)):
            wrong = f"no optimizer/{name}/{key}, wanted one"
            if key in keys:
                wrong = f"optimizer/{name}/{key}, wanted none"
            raise CheckpointError(f"checkpoint {saved.path}: found {wrong}")
        states[name] = {key: _room_for(saved, name, key, parameters[name]) for key in wanted}
        into |= {f"optimizer/{name}/{key}": tensor for key, tensor in states[name].items()}
    saved.read(into)
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def _room_for(saved: SavedCheckpoint, name: str, key: str, parameter: nn.Parameter) -> Tensor:
    """An empty tensor for one entry of a parameter's saved state."""
    entry = saved.tensors[f"optimizer/{name}/{key}"]
    dtype = entry.dtype
    shape = torch.Size() if key == "step" else parameter.shape
    if entry.size != shape or not dtype.is_floating_point:
        raise CheckpointError(
            f"checkpoint {saved.path}: found shape {tuple(entry.size)} of {dtype} for "
            f"optimizer/{name}/{key}, wanted {tuple(shape)} of a floating-point type"
        )
    if key == "step":
        return torch.zeros((), dtype=dtype, device=parameter.device)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
