"""Checks on one device: results of calls, compared with float64."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.backend import own_backend
from longhaul.kernels.testing import compare, poisoned_memory
from longhaul.kernels.verify.candidates import does_not_fit, with_candidate

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call to check. Each process draws the same inputs from a fixed seed.

    An op has a subclass of its own, with the sizes and settings of its calls.
    """

    name: str
    dtype: str = "bfloat16"
    forms: tuple[str, ...] = ()  # the ways to compute it, each of which is checked
    T: int = 2000
    candidate: int | None = None  # of the configurations of each kernel; None: that of the chip

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def multiple(self) -> float:
        """Allowed multiple of the error that the definition makes in the same dtype."""
        return 30.0 if self.dtype == "float32" else 4.0

    @property
    def gigabytes(self) -> float:
        """About how much memory of a GPU a process needs for it."""
        return 1.5

    @property
    def needs_gpu(self) -> bool:
        """Whether a machine without a GPU cannot run it."""
        return False

    def backend(self, device: torch.device) -> str:
        """The backend that is checked on a device, by name, so that no call falls back."""
        return own_backend(device)

    @abstractmethod
    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs by name."""

    @abstractmethod
    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """All results by name, gradients too, with a `form` and a `backend`."""

    @abstractmethod
    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The results of the definition, computed in this dtype."""

    def noise_bound(self, name: str, inputs: dict[str, Tensor]) -> float | None:
        """A bound for a result that is rounding noise, and must be finite; None compares it."""
        return None

    def other_faults(self, actual: dict[str, Tensor], oracle: dict[str, Tensor]) -> list[str]:
        """What else is wrong with results."""
        return []

    def shrunk(self, tokens: int, width: int) -> Case:
        """The same case at sizes that a CPU checks in milliseconds."""
        return replace(self, T=min(self.T, tokens))


def check(case: Case, device: torch.device, backend: str) -> list[dict[str, Any]]:
    """One record per form: the errors of every tensor, and a list of faults.

    Raises only if the device itself has failed.
    """
    started = time.monotonic()
    records = []
    inputs = case.inputs(device)
    oracle = case.expected(inputs, torch.float64)
    is_float32 = case.dtype == "float32"
    definition = case.expected(inputs, torch.float32 if is_float32 else case.torch_dtype)
    for form in case.forms:
        record: dict[str, Any] = asdict(case) | {"form": form, "tensors": {}, "faults": []}
        del record["forms"]
        try:
            with with_candidate(case.candidate):
                record |= _compare(case, inputs, oracle, definition, backend, form)
        except Exception as error:
            if case.candidate is not None and does_not_fit(error):
                record["does_not_fit"] = str(error)[:500]
            else:
                record["faults"] = [f"{type(error).__name__}: {error}"[:500]]
                record["raised"] = True
            if device.type == "cuda":
                torch.cuda.synchronize()
        record["seconds"] = round(time.monotonic() - started, 2)
        records.append(record)
        started = time.monotonic()
    if device.type == "cuda":
        # Other processes share the GPU's memory.
        torch.cuda.empty_cache()
    return records


def _compare(
    case: Case,
    inputs: dict[str, Tensor],
    oracle: dict[str, Tensor],
    definition: dict[str, Tensor],
    backend: str,
    form: str,
) -> dict[str, Any]:
    before = {name: x.clone() for name, x in inputs.items()}

    def once() -> dict[str, Tensor]:
        with poisoned_memory():
            return case.run(inputs, case.torch_dtype, form=form, backend=backend)

    actual, again = once(), once()
    tensors, faults = {}, []
    for name, wanted in oracle.items():
        bound = case.noise_bound(name, inputs)
        if bound is not None:
            if not (actual[name].isfinite().all() and actual[name].abs().max() < bound):
                faults.append(f"{name}: not finite, or above {bound}")
            continue
        # If the definition overflows in float32, only the rounding of the oracle is allowed.
        is_usable = definition[name].isfinite().all()
        found = compare(
            actual[name],
            wanted,
            definition[name] if is_usable else wanted.to(definition[name].dtype),
            multiple=case.multiple,
            dtype=case.torch_dtype,
        )
        numbers = {"error": found.error, "allowed": found.allowed, "norm_error": found.norm_error}
        tensors[name] = {key: x if isfinite(x) else None for key, x in numbers.items()}
        if found.fault:
            faults.append(f"{name}: {found.fault}")
    faults += case.other_faults(actual, oracle)
    if "out" in actual and actual["out"].dtype != case.torch_dtype:
        faults.append(f"out: {actual['out'].dtype}, wanted {case.torch_dtype}")
    faults += [f"{name}: differs when run again" for name in actual if _differ(actual, again, name)]
    faults += [
        f"{name}: an input was written to" for name in inputs if _differ(inputs, before, name)
    ]
    return {"tensors": tensors, "faults": faults}


def _differ(these: dict[str, Tensor], those: dict[str, Tensor], name: str) -> bool:
    return not torch.equal(these[name], those[name])
