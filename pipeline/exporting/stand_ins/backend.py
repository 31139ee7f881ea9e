"""Stands in for longhaul.kernels.backend: an exported model has no backend but torch's."""

from typing import Literal

import torch

Backend = Literal["auto", "reference", "torch", "triton"]


def cannot_run(backend: str, reason: str) -> ValueError:
    return ValueError(f"backend: {backend!r} cannot run: {reason}; wanted 'torch' or 'auto'")


def why_dtype_unsupported(dtype: torch.dtype) -> str | None:
    return "an exported model does not carry Triton's kernels"


def triton_unless(op: str, backend: str, reason: str | None) -> Literal["torch", "triton"]:
    return "torch"


def uses_triton(backend: str, device: torch.device, why_not: str | None) -> bool:
    return False


def resolve_backend(
    backend: str, device: torch.device, *others: str
) -> Literal["reference", "torch", "triton"]:
    if backend == "reference":
        return "reference"
    if backend in ("auto", "torch"):
        return "torch"
    raise cannot_run(backend, "an exported model does not carry its kernels")
