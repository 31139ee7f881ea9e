"""What modules say of their parameters to the optimizer: roles, and matrices held in one."""

from typing import Literal

from torch import nn

from longhaul.modules.attention.base import Float32Parameters

Role = Literal["matrix", "embedding", "head", "other"]
"""A matrix belongs to a block. Norms, biases, gates, rates and learned states are others."""


def parameter_roles(module: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by name; names are the same under every strategy.

    The weight of an `nn.Linear` is a matrix, unless it is in a `Float32Parameters`. Any other
    parameter is an "other", whatever its shape. A module that knows better has an attribute
    `roles`: roles by the names of its parameters, or of those of its children.

    Raises:
        ValueError: `roles` names a parameter that the module does not have.
    """
    found: dict[str, Role] = {name: "other" for name, _ in module.named_parameters()}
    if isinstance(module, nn.Linear):
        found["weight"] = "matrix"
    if not isinstance(module, Float32Parameters):
        for name, child in module.named_children():
            found |= {f"{name}.{own}": role for own, role in parameter_roles(child).items()}
    stated: dict[str, Role] = getattr(module, "roles", {})
    if unknown := stated.keys() - found.keys():
        raise ValueError(
            f"{type(module).__name__}.roles: found {', '.join(sorted(unknown))}, wanted names of "
            "parameters"
        )
    return found | stated


def fused_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The rows of each matrix in parameters that hold several, one below the other, by name.

    A module with such a parameter has an attribute `fused_rows`: rows by the name of the parameter,
    or by that of a child's.

    Raises:
        ValueError: a module names a parameter that it does not have, or other rows than it has.
    """
    sizes = {name: parameter.shape[:1] for name, parameter in model.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        stated: dict[str, tuple[int, ...]] = getattr(module, "fused_rows", {})
        for own, rows in stated.items():
            name = f"{path}.{own}" if path else own
            if tuple(sizes.get(name, ())) != (sum(rows),):
                raise ValueError(
                    f"{type(module).__name__}.fused_rows: found {own} of {rows} rows, wanted a "
                    "parameter and all its rows"
                )
            found[name] = rows
    return found
