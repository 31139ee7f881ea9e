"""Stands in for einops in an exported model, whose machine may not have it.

`rearrange`, `reduce` and `repeat` of tensors, with names, 1, parentheses and an ellipsis.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def rearrange(x: Tensor | Sequence[Tensor], pattern: str, **sizes: int) -> Tensor:
    """x with its axes reordered, split and joined as the pattern says."""
    return _transform(x, pattern, None, sizes)


def repeat(x: Tensor | Sequence[Tensor], pattern: str, **sizes: int) -> Tensor:
    """As `rearrange`; axes that are new on the right side repeat x."""
    return _transform(x, pattern, None, sizes)


def reduce(x: Tensor | Sequence[Tensor], pattern: str, reduction: str, **sizes: int) -> Tensor:
    """As `rearrange`; axes that are missing on the right side are summed, averaged, ..."""
    return _transform(x, pattern, reduction, sizes)


def _transform(
    x: Tensor | Sequence[Tensor], pattern: str, reduction: str | None, sizes: dict[str, int]
) -> Tensor:
    tensor = x if isinstance(x, Tensor) else torch.stack(list(x))
    left, right = (_groups(side) for side in pattern.split("->"))
    left = _expand(left, tensor.ndim)
    ellipsis = [name for group in left for name in group if name.startswith("...")]
    right = _expand(right, 0, ellipsis)
    sizes = sizes | _sizes(left, tensor, sizes, pattern)
    before = [name for group in left for name in group]
    after = [name for group in right for name in group]
    tensor = tensor.reshape([sizes[name] for name in before])
    if gone := [axis for axis, name in enumerate(before) if name not in after]:
        if reduction is None:
            raise ValueError(f"einops: {pattern!r} loses {before[gone[0]]}, wanted it on the right")
        tensor = _REDUCTIONS[reduction](tensor, dim=gone)
        before = [name for name in before if name in after]
    tensor = tensor.permute([before.index(name) for name in after if name in before])
    for axis, name in enumerate(after):
        if name not in before:
            tensor = tensor.unsqueeze(axis)
    tensor = tensor.expand([sizes[name] for name in after])
    return tensor.reshape([math.prod(sizes[name] for name in group) for group in right])


def _groups(side: str) -> list[list[str]]:
    """The names of every axis of one side; none for 1."""
    groups: list[list[str]] = []
    is_open = False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            is_open = word == "("
            if is_open:
                groups.append([])
        elif is_open:
            groups[-1] += [] if word == "1" else [word]
        else:
            groups.append([] if word == "1" else [word])
    return groups


def _expand(groups: list[list[str]], ndim: int, names: list[str] | None = None) -> list[list[str]]:
    """The groups with names for the axes that an ellipsis stands for."""
    if names is None:
        names = [f"...{axis}" for axis in range(ndim - len(groups) + 1)]
    expanded = []
    for group in groups:
        if group == ["..."]:
            expanded += [[name] for name in names]
        else:
            expanded.append([n for name in group for n in (names if name == "..." else [name])])
    return expanded


def _sizes(
    groups: list[list[str]], x: Tensor, given: dict[str, int], pattern: str
) -> dict[str, int]:
    """The size of every name on the left side, of which each axis leaves one open at most."""
    if len(groups) != x.ndim:
        raise ValueError(f"einops: {pattern!r} found shape {tuple(x.shape)}")
    sizes: dict[str, int] = {}
    for group, size in zip(groups, x.shape, strict=True):
        known = math.prod(given[name] for name in group if name in given)
        for name in group:
            sizes[name] = given[name] if name in given else size // known
        if math.prod(sizes[name] for name in group) != size:
            raise ValueError(f"einops: {pattern!r} found shape {tuple(x.shape)}, wanted {sizes}")
    return sizes
