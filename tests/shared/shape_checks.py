"""Checks of shapes, once for each form of a call."""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jaxtyping
import torch


def once_per_form(fn: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """`checked` for the first call with arguments of the same types, dtypes and sizes, then `fn`.

    A check takes many times as long as the small functions of which one call of an op has hundreds.
    """
    known: set[Hashable] = set()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        form = _form(args), tuple((name, _form(value)) for name, value in kwargs.items())
        if form in known:
            return fn(*args, **kwargs)
        result = checked(*args, **kwargs)
        known.add(form)
        return result

    return call


def _form(value: Any) -> Hashable:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.dtype, value.shape
    if isinstance(value, torch.Tensor):
        return object()  # Its sizes may be symbols: it is checked at every call.
    if isinstance(value, tuple | list):
        return type(value), *map(_form, value)
    if isinstance(value, torch.nn.Module):
        return weakref.ref(value)  # Its options decide shapes too.
    # Sizes and flags decide the shape of what is returned.
    return type(value), value if isinstance(value, int | str) else None
