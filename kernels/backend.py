"""Which implementation of an op runs: found out once, asked for by name."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["auto", "reference", "torch", "triton"]


def why_unavailable(backend: str) -> str | None:
    """The reason why a backend cannot run here, or None when it can."""
    if backend == "triton":
        return "its kernels are not part of this version yet"
    return None


def resolve_backend(backend: str) -> Literal["reference", "torch"]:
    """The backend that will run. An explicit choice that cannot run raises and says why."""
    if backend not in get_args(Backend):
        raise ValueError(
            f"backend: found {backend!r}, wanted one of {', '.join(get_args(Backend))}"
        )
    if reason := why_unavailable(backend):
        raise ValueError(f"backend: {backend!r} cannot run: {reason}; wanted 'torch' or 'auto'")
    return "reference" if backend == "reference" else "torch"
