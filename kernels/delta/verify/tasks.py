"""Time and memory of the delta rule and its peers, on equal inputs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from longhaul.kernels.delta import delta_rule
from longhaul.kernels.delta.verify.catalogue import BACKENDS
from longhaul.kernels.verify.timing import Timed, relative_difference, training_times

_TOKENS = (4096, 16_384, 65_536)
# Gates, and whether something is erased.
_KINDS = {
    "DeltaNet": ("none", True),
    "Gated DeltaNet": ("scalar", True),
    "KDA": ("channel", True),
    "GLA": ("channel", False),
}


@dataclass(frozen=True, kw_only=True)
class DeltaTask:
    """The time of one call, forward and backward: B1 H8 K128 V128, bfloat16."""

    kind: str
    implementation: str  # a backend of ours, "fla", or "sdpa flash"
    T: int
    H: int = 8
    K: int = 128

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"training: {self.kind}, T {self.T}: {self.implementation}"

    @property
    def is_ours(self) -> bool:
        """Whether it runs this project's code, or PyTorch's alone."""
        return self.package is None

    @property
    def package(self) -> str | None:
        """The module that a peer is imported from; None for what PyTorch and this project bring."""
        return "fla" if self.implementation == "fla" else None

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Times are medians in milliseconds, beside the middle 60 %."""
        if self.implementation == "sdpa flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return training_times(self._attention(device), device)
        call = self._call(self.implementation, device)
        result = training_times(call, device)
        if self.implementation == "fla":
            # Its times are kept even if our call raises.
            with suppress(Exception):
                ours = self._call("torch", device)
                result["differs_by"] = relative_difference(call, ours)
        return result

    def _call(self, backend: str, device: torch.device) -> Timed:
        gates, erases = _KINDS[self.kind]
        q, k, v, logits = self._inputs(device)
        log_g = logsigmoid(logits.float() + 5)
        leaves = {"q": q, "k": F.normalize(k.float(), dim=-1).to(k.dtype), "v": v}
        if erases:
            leaves["beta"] = logits[..., 0].sigmoid()
        if gates != "none":
            leaves["log_g"] = log_g if gates == "channel" else log_g[..., 0].contiguous()
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        given = [leaves.get(name) for name in ("q", "k", "v", "beta", "log_g")]
        return Timed(
            lambda: delta_rule(*given, backend=backend)[0],  # type: ignore[arg-type]
            list(leaves.values()),
        )

    def _attention(self, device: torch.device) -> Timed:
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in self._inputs(device)[:3]]
        q, k, v = leaves
        return Timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), leaves)

    def _inputs(self, device: torch.device) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, self.T, self.H, self.K)
        return [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4)]


def op_tasks() -> list[DeltaTask]:
    """The op on each of its backends, and attention."""
    every = [(kind, backend) for kind in _KINDS for backend in BACKENDS]
    return [
        DeltaTask(kind=kind, implementation=implementation, T=T)
        for T in _TOKENS
        for kind, implementation in (*every, ("softmax", "sdpa flash"))
    ]


def peer_tasks() -> list[DeltaTask]:
    """Another project's kernels for the same recurrences."""
    return [DeltaTask(kind=kind, implementation="fla", T=T) for T in _TOKENS for kind in _KINDS]
