"""Memory that custom ops take inside, where tracing on tensors without data does not look."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from math import ceil
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from longhaul.kernels.power import chunked
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.cost import choose_chunk_size, choose_form
from longhaul.pipeline.planning.memory_tracker import MemoryTracker

Backend = Literal["torch", "triton"]


class OpWorkspace:
    """Bytes that an op takes while it runs, its results included, by the backend that runs it.

    The power op's own code is run, on tensors of the `meta` device: it allocates what it would
    allocate, and Triton's kernels are not launched. What is known of a call is kept.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend if find_spec("triton") is not None else "torch"
        self._known: dict[Any, int] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        name = op.name()
        if name.startswith("torch_nn::_linear_cross_entropy"):
            return _loss_bytes(*args[:2])
        if not name.startswith("longhaul::power_"):
            return 0
        key = (name, tuple(map(_shape, args)), tuple(sorted(map(str, kwargs.items()))))
        if key not in self._known:
            # Tables that launchers keep for later calls must not be fake tensors.
            with unset_fake_temporarily():
                self._known[key] = self._power_bytes(name, args, dict(kwargs))
        return self._known[key]

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
        live = MemoryTracker()
        live.assign(inputs, "activations")
        given = sum(live.now.values())
        with torch.no_grad(), skipping, live:
            if name == "longhaul::power_forward":
                run.forward(call, *inputs)
            else:
                run.backward(call, _saved(call, inputs), *inputs[12:], needs)
        return sum(live.peak.values()) - given

    def _call(self, q: Tensor, v: Tensor, settings: dict[str, Any]) -> PowerCall:
        """The call as it would be on a device that the backend serves: a trace is on the CPU's."""
        sizes = q.shape[1], q.shape[3], v.shape[3], settings["degree"]
        if settings["chunk_size"] == choose_chunk_size(*sizes, "torch"):
            settings["chunk_size"] = choose_chunk_size(*sizes, self._backend)
        settings["form"] = choose_form(*sizes, self._backend)
        return PowerCall(**settings)

    def _implementation(
        self, call: PowerCall, inputs: list[Any]
    ) -> tuple[ModuleType, AbstractContextManager[object]]:
        if self._backend == "triton":
            # Triton takes long to import, and may not be there.
            from longhaul.kernels.offline import skipping
            from longhaul.kernels.power import triton

            has_state = inputs[4] is not None
            if triton.why_not(call, inputs[0].shape[3], inputs[2].shape[3], has_state) is None:
                return triton, skipping("sm_90")
        return chunked, nullcontext()


def _saved(call: PowerCall, inputs: list[Any]) -> Saved:
    """What the op's own backward makes of its tensors: absent ones are empty there."""
    kept = inputs[:12]
    if not call.output_final_state:
        kept[8] = kept[9] = None
    if not call.normalize:
        kept[10] = kept[11] = None
    return Saved(*kept)


def _loss_bytes(hidden: Tensor, weight: Tensor) -> int:
    """What linear_cross_entropy takes on a GPU: its chunk of logits, and the two gradients.

    Its documentation, with the defaults "compact" and "aspect_ratio:2": half as many rows as make
    the logits as large as the input, up to a power of two. They are float32, with a copy in 16 bits
    for the products if the input is in 16 bits, and two arrays as wide as the input beside them.
    """
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    at_once = ceil(rows / ceil(vocabulary / width))
    at_once = max(1, (1 << (at_once - 1).bit_length()) // 2)
    copy = 0 if hidden.itemsize == 4 else hidden.itemsize
    chunk = at_once * ((4 + copy) * vocabulary + (4 + hidden.itemsize) * width)
    return chunk + hidden.nbytes + weight.nbytes


def _shape(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x
