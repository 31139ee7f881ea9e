"""The tensors that a run goes on from, by name, and the way back, to the bit.

An optimizer's state is keyed by the parameter's own name, not by its place in a list, and what a
strategy shards is saved as the DTensors that it is: any other strategy can read it.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longhaul.pipeline.checkpoints.store import CheckpointError, Saved


def training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`model/NAME` and `optimizer/NAME/KEY`, not copied."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = _parameter_names(model)
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            tensors[f"optimizer/{names[id(parameter)]}/{key}"] = value
    return tensors


def restore_training(model: nn.Module, optimizer: Optimizer, saved: Saved) -> None:
    """Read back what `training_tensors` named, into this model's own sharding."""
    # First: the moments that it has would be held beside those that are read.
    optimizer.state.clear()
    into = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, entry in saved.tensors.items():
        # Parameter names hold dots, never a slash.
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
        if entry.size == parameter.shape:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:  # a count of steps
            value = torch.zeros(entry.size, dtype=dtype, device=parameter.device)
        into[f"optimizer/{name}/{key}"] = states.setdefault(name, {})[key] = value
    saved.read(into)
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Names by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
