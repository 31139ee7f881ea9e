"""Sums along time that begin anew where segments, such as documents, begin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def tokens_since(is_first: Tensor) -> Tensor:
    """Tokens of its own segment before each token, from where segments begin: (B, T, …).

    The first token of a row begins a segment whether it is marked or not.
    """
    shape = (1, -1, *(1,) * (is_first.ndim - 2))
    time = torch.arange(is_first.shape[1], device=is_first.device).view(shape)
    return time - torch.where(is_first, time, 0).cummax(dim=1).values


def sum_within(
    x: Tensor, age: Tensor, add: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> Tensor:
    """Sums of x (B, T, …) over the tokens of a segment up to each token, in log2(T) passes.

    After n passes a token has the sum over the last 2^n tokens of its segment. So nothing of
    another segment is in it, not even a rounding error, as in a difference of sums over the row.

    Args:
        x: what is added up.
        age: tokens of its own segment before each token, (B, T) or as many dimensions as x.
        add: addition, or another associative function.
    """
    age = age.reshape(*age.shape, *(1,) * (x.ndim - age.ndim))
    step = 1
    while step < x.shape[1]:
        late = x[:, step:]
        late = torch.where(age[:, step:] >= step, add(late, x[:, :-step]), late)
        x = torch.cat([x[:, :step], late], dim=1)
        step *= 2
    return x
