"""The choice of the backend that runs an op: by name, or automatically."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

Backend = Literal["auto", "reference", "torch", "triton"]

# A constant, because torch.compile cannot trace the search for a package.
_HAS_TRITON = find_spec("triton") is not None


_is_triton_assumed = False


@contextmanager
def assuming_triton() -> Iterator[None]:
    """Resolve "auto" as on a machine with a GPU, to trace what it would call; nothing can run."""
    global _is_triton_assumed
    before, _is_triton_assumed = _is_triton_assumed, True
    try:
        yield
    finally:
        _is_triton_assumed = before


def why_unavailable(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot run on tensors of a device; None when it can."""
    if backend != "triton":
        return None
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda" or _is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return f"the tensors are on {device}"


def why_dtype_unsupported(dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot take q, k and v of a dtype; None when they can."""
    if dtype == torch.float64:
        return "it has no float64"
    # torch.compile cannot trace Triton's settings; a graph is compiled for a GPU anyway.
    if dtype == torch.float32 or _is_triton_assumed or torch.compiler.is_compiling():
        return None
    if _is_interpreted():
        return "its interpreter is silently wrong in 16 bits"
    return None


def _is_interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, which works on any device."""
    # Triton takes long to import, and may not be installed.
    from triton import knobs

    return bool(knobs.runtime.interpret)


def cannot_run(backend: str, reason: str) -> ValueError:
    """The error for a backend that was chosen by name and cannot run."""
    return ValueError(f"backend: {backend!r} cannot run: {reason}; wanted 'torch' or 'auto'")


def own_backend(device: torch.device) -> Literal["torch", "triton"]:
    """The backend to verify, chosen by name so that no call falls back to another."""
    return "triton" if device.type == "cuda" else "torch"


def resolve_backend(
    backend: str, device: torch.device, *others: str
) -> Literal["reference", "torch", "triton"]:
    """The backend that will run. A backend chosen by name that cannot run raises ValueError.

    `others` are the names that the caller takes beside these.
    """
    if backend == "reference":
        return "reference"
    if backend == "torch":
        return "torch"
    if backend == "triton":
        if reason := why_unavailable(backend, device):
            raise cannot_run(backend, reason)
        return "triton"
    if backend != "auto":
        raise ValueError(
            f"backend: found {backend!r}, wanted one of {', '.join((*get_args(Backend), *others))}"
        )
    if _is_triton_assumed:
        return "triton"
    is_fast = device.type == "cuda" and why_unavailable("triton", device) is None
    return "triton" if is_fast else "torch"


def triton_unless(op: str, backend: str, reason: str | None) -> Literal["torch", "triton"]:
    """Triton if there is no reason against it, else torch; raise if Triton was chosen by name."""
    if reason is None:
        return "triton"
    if backend == "triton":
        raise cannot_run(backend, reason)
    _say(op, reason)
    return "torch"


def _say(op: str, reason: str) -> bool:
    _log_once(op, reason)
    return True


# So that `_say` is called while a graph is traced. torch.compiler.assume_constant_result does the
# same, but imports torch._dynamo first, which takes a second.
_say._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _log_once(op: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s runs in torch, not Triton: %s", op, reason)


def uses_triton(backend: str, device: torch.device, why_not: str | None) -> bool:
    """Whether a function without a reference runs its kernel, which a reason may forbid."""
    resolved = resolve_backend(backend, device)
    if resolved == "reference":
        raise cannot_run(backend, "this function has no reference")
    if resolved == backend == "triton" and why_not:
        raise cannot_run(backend, why_not)
    return resolved == "triton" and not why_not
