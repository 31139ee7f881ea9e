"""Memory that custom ops allocate inside, which tracing on tensors without data does not see."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.cost import choose_chunk_size, choose_form
from longhaul.kernels.power.torch import backend as chunked
from longhaul.pipeline.planning.memory_tracker import MemoryTracker

Backend = Literal["torch", "triton"]


class OpWorkspace:
    """Bytes that an op needs while it runs, including its results, for one backend.

    The power op's own code runs on `meta` tensors: it makes its usual allocations, and Triton's
    kernels are not launched. The result for each call is cached.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend if find_spec("triton") is not None else "torch"
        self._cached: dict[Any, int] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        name = op.name()
        if not name.startswith("longhaul::power_"):
            return 0
        key = (name, tuple(map(_shape, args)), tuple(sorted(map(str, kwargs.items()))))
        if key not in self._cached:
            # Launchers cache tables for later calls, which must not be fake tensors.
            with unset_fake_temporarily():
                self._cached[key] = self._power_bytes(name, args, dict(kwargs))
        return self._cached[key]

    def _power_bytes(self, name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> int:
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if isinstance(x, Tensor)
            else x
            for x in args
        ]
        needs = tuple(settings.pop("needs", ()))
        settings.pop("backend")
        call = self._call(inputs[0], inputs[2], settings)
        run, skipping = self._implementation(call, inputs)
        tracker = MemoryTracker()
        tracker.assign(inputs, "activations")
        given = sum(tracker.now.values())
        with torch.no_grad(), skipping, tracker:
            if name == "longhaul::power_forward":
                run.forward(call, *inputs)
            else:
                run.backward(call, _saved(call, inputs), *inputs[12:], needs)
        return sum(tracker.peak.values()) - given

    def _call(self, q: Tensor, v: Tensor, settings: dict[str, Any]) -> PowerCall:
        """The call as made on the backend's own device; the traced call was made for the CPU."""
        sizes = q.shape[1], q.shape[3], v.shape[3], settings["degree"]
        if settings["chunk_size"] == choose_chunk_size(*sizes, "torch"):
            settings["chunk_size"] = choose_chunk_size(*sizes, self._backend)
        settings["form"] = choose_form(*sizes, self._backend)
        return PowerCall(**settings)

    def _implementation(
        self, call: PowerCall, inputs: list[Any]
    ) -> tuple[ModuleType, AbstractContextManager[object]]:
        if self._backend == "triton":
            # Imported here: Triton is optional, and slow to import.
            from longhaul.kernels.offline import skipping
            from longhaul.kernels.power import triton

            has_state = inputs[4] is not None
            if triton.why_not(call, inputs[0].shape[3], inputs[2].shape[3], has_state) is None:
                return triton, skipping("sm_90")
        return chunked, nullcontext()


def _saved(call: PowerCall, inputs: list[Any]) -> Saved:
    """The saved tensors as the op's backward sees them: unused ones are empty in its arguments."""
    kept = inputs[:12]
    if not call.output_final_state:
        kept[8] = kept[9] = None
    if not call.normalize:
        kept[10] = kept[11] = None
    return Saved(*kept)


def _shape(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x
