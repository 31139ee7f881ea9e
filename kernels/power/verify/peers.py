"""The calls that are timed: this op and its peers, on equal inputs, each in its own layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from longhaul.kernels.backend import own_backend
from longhaul.kernels.power import PowerState, power_attention, power_attention_step
from longhaul.kernels.power.cost import Form
from longhaul.kernels.shapes import state_features
from longhaul.kernels.verify.timing import Timed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and settings of a timed call, which has as many key heads as query heads."""

    T: int = 65_536
    B: int = 1
    H: int = 8
    K: int = 64
    degree: int = 2
    normalize: bool = True
    form: Form = "chunked"
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (B, T, H, K), random, and log gates (B, T, H) in float32."""
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(self.B, self.T, self.H, self.K, generator=generator, device=device).to(
                self.dtype
            )
            for _ in range(3)
        )
        gates = torch.randn(self.B, self.T, self.H, generator=generator, device=device)
        return q, k, v, logsigmoid(gates + 5)


# Chunk sizes in tokens that `retention` is timed with, as its README calls it and compiled, as its
# own benchmark does: we compare with its fastest. It runs its Triton kernels unless the package
# vidrial is installed; results tell which.
RETENTION_CHUNKS = (256, 512, 1024)
_RETENTION = re.compile(r"retention(?P<compiled>, compiled)?, chunk (?P<chunk>\d+)")

# The backend that SDPA is restricted to.
_SDPA = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
SDPA = tuple(_SDPA)
# The dtype of states in decoding.
DECODERS = {"longhaul, float32 state": torch.float32, "longhaul, bfloat16 state": torch.bfloat16}


def training_call(implementation: str, shape: Shape, device: torch.device) -> Timed:
    """One forward pass, ready for a backward pass: (B, T, H, K), or (B, H, T, K) for SDPA.

    `implementation` is "longhaul", "sdpa", "sdpa flash", "sdpa cudnn", "chunk_simple_gla",
    "retention, chunk C" or "retention, compiled, chunk C", where C is a number of tokens.

    Raises: ImportError where the peer is not installed.
    """
    q, k, v, log_g = shape.inputs(device)
    if implementation.startswith("sdpa"):
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        q, k, v = leaves
        return Timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), leaves)
    q, k, v, log_g = leaves = [x.requires_grad_() for x in (q, k, v, log_g)]
    if implementation == "longhaul":
        backend = own_backend(device)
        return Timed(
            lambda: power_attention(
                q,
                k,
                v,
                log_g,
                degree=shape.degree,
                normalize=shape.normalize,
                form=shape.form,
                backend=backend,
            )[0],
            leaves,
        )
    if implementation == "chunk_simple_gla":
        chunk_simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
        return Timed(lambda: chunk_simple_gla(q, k, v, log_g)[0], leaves)
    found = _RETENTION.fullmatch(implementation)
    assert found is not None, implementation
    power_retention = import_module("retention").power_retention
    if found["compiled"]:
        power_retention = torch.compile(power_retention)
    chunk_size = min(int(found["chunk"]), shape.T)
    return Timed(
        lambda: power_retention(q, k, v, log_g, deg=shape.degree, chunk_size=chunk_size), leaves
    )


def chosen_kernels(implementation: str) -> AbstractContextManager[None]:
    """Restricts SDPA to the backend of its name, which raises where it cannot run."""
    return sdpa_kernel(_SDPA[implementation]) if implementation in _SDPA else nullcontext()


def decoding_call(
    implementation: str, shape: Shape, device: torch.device, num_states: int
) -> Callable[[], None]:
    """One token for each of `num_states` layers, whose states together exceed the GPU's cache.

    SDPA reads the keys and values of all T tokens. The others read and overwrite one state per
    layer, as generation does: DECODERS has their dtypes.
    """
    generator = torch.Generator(device).manual_seed(0)

    def randn(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    B, T, H, K = shape.B, shape.T, shape.H, shape.K
    if implementation in _SDPA:
        q = randn(B, H, 1, K)
        caches = [(randn(B, H, T, K), randn(B, H, T, K)) for _ in range(num_states)]

        def attend() -> None:
            for k, v in caches:
                scaled_dot_product_attention(q, k, v)

        return attend
    P = state_features(K, shape.degree)
    states = [
        PowerState(
            randn(B, H, P, K, dtype=torch.float32), randn(B, H, P, dtype=torch.float32).abs()
        )
        for _ in range(num_states)
    ]
    q, k, v = (randn(B, 1, H, K) for _ in range(3))
    log_g = logsigmoid(randn(B, 1, H, dtype=torch.float32) + 5)

    if DECODERS[implementation] == torch.bfloat16:
        states = [state.to_bfloat16() for state in states]
    backend = own_backend(device)

    def step() -> None:
        with torch.no_grad():
            for state in states:
                power_attention_step(
                    state, q, k, v, log_g,
                    degree=shape.degree, normalize=shape.normalize, inplace=True,
                    backend=backend,
                )  # fmt: skip

    return step


def decoding_bytes(implementation: str, shape: Shape) -> int:
    """Bytes that one token of one layer has to move: keys and values once, or a state twice."""
    rows = shape.B * shape.H
    if implementation in _SDPA:
        return 2 * rows * shape.T * shape.K * shape.dtype.itemsize
    entry = shape.K * DECODERS[implementation].itemsize + 4  # with its norm
    return 2 * rows * state_features(shape.K, shape.degree) * entry
