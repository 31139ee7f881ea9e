"""Forward and backward passes as custom ops, visible to torch.compile, checkpointing and counters.

The whole op and the state alone have two custom ops each. A schema has no optional results: here an
absent result is an empty tensor of shape (0,); callers and backends use None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longhaul.kernels.power.call import Forward, PowerCall, Saved, SavedState
from longhaul.kernels.power.cost import (
    power_backward_flops,
    power_flops,
    power_state_flops,
)
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.torch import backend as torch_backend
from longhaul.kernels.shapes import state_features

# Exported models carry copies of this file. Each copy in a process has ops of its own.
_NAMESPACE = "longhaul"
if not __name__.startswith("longhaul."):
    _NAMESPACE += "_" + sha256(__name__.encode()).hexdigest()[:16]
_OPS = getattr(torch.ops, _NAMESPACE)

# Arguments of `power_backward` before the gradients: inputs and results of `power_forward`.
NUM_SAVED = len(Saved._fields)

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_g, Tensor? kv, Tensor? norm, Tensor? cu_seqlens"
)
_SETTINGS = (
    "int degree, float scale, bool normalize, bool output_final_state, str form, SymInt chunk_size,"
    " bool keeps_states, str backend"
)
_RESULTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"
_FORWARD = f"({_INPUTS}, *, {_SETTINGS}) -> ({_RESULTS})"
_BACKWARD = (
    f"({_INPUTS}, Tensor out, Tensor final_kv, Tensor final_norm, Tensor inverse, Tensor is_live,"
    " Tensor chunk_kv, Tensor chunk_norm, Tensor? dout, Tensor? dkv, Tensor? dnorm, *,"
    f" bool[] needs, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_STATE_INPUTS = "Tensor k, Tensor v, Tensor? log_g, Tensor? kv, Tensor? norm, Tensor? cu_seqlens"
_STATE_SETTINGS = "int degree, int chunk_size, str backend"
_STATE_FORWARD = f"({_STATE_INPUTS}, *, {_STATE_SETTINGS}) -> (Tensor, Tensor)"
_STATE_BACKWARD = (
    f"({_STATE_INPUTS}, Tensor final_kv, Tensor final_norm, Tensor? dkv, Tensor? dnorm, *,"
    f" bool[] needs, {_STATE_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def run(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output and final state of a call, differentiable."""
    out, final_kv, final_norm, *_ = power_forward(
        q, k, v, log_g, kv, norm, cu_seqlens,
        degree=call.degree,
        scale=call.scale,
        normalize=call.normalize,
        output_final_state=call.output_final_state,
        form=call.form,
        chunk_size=call.chunk_size,
        keeps_states=call.keeps_states and backend == "triton",
        backend=backend,
    )  # fmt: skip
    return (out, final_kv, final_norm) if call.output_final_state else (out, None, None)


def implementation(backend: str) -> ModuleType:
    """The module with a backend's passes."""
    if backend != "triton":
        return torch_backend
    # Triton takes long to import, and may not be installed.
    from longhaul.kernels.power import triton

    return triton


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _in_dtypes_of(
    inputs: Iterable[Tensor | None], grads: Iterable[Tensor | None], like: Tensor
) -> tuple[Tensor, ...]:
    """Each gradient in the dtype of its input: a backend computes those of states in float32."""
    return tuple(
        like.new_empty(0) if grad is None or x is None else grad.to(x.dtype)
        for x, grad in zip(inputs, grads, strict=False)  # not of cu_seqlens, the last input
    )


@torch.library.custom_op(f"{_NAMESPACE}::power_forward", mutates_args=(), schema=_FORWARD)
def power_forward(*inputs: Any, backend: str, **settings: Any) -> tuple[Tensor, ...]:
    """The results of a backend's `forward`: the fields of `Forward`."""
    q = inputs[0]
    # Autocast would turn the matrix products inside into 16-bit ones.
    with torch.autocast(q.device.type, enabled=False):
        results: Forward = implementation(backend).forward(PowerCall(**settings), *inputs)
    return tuple(_or_empty(x, q) for x in results)


@torch.library.custom_op(f"{_NAMESPACE}::power_backward", mutates_args=(), schema=_BACKWARD)
def power_backward(
    *tensors: Any, needs: list[bool], backend: str, **settings: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_g, kv and norm."""
    call = PowerCall(**settings)
    q = tensors[0]
    saved = saved_of(call, tensors[:NUM_SAVED])
    with torch.autocast(q.device.type, enabled=False):
        grads = implementation(backend).backward(call, saved, *tensors[NUM_SAVED:], tuple(needs))
    return _in_dtypes_of(tensors[:7], grads, q)


def saved_of(call: PowerCall, tensors: Sequence[Tensor | None]) -> Saved:
    """What a backend saved, from the arguments of `power_backward`, where absent is empty."""
    saved = Saved(*tensors)  # type: ignore[arg-type]
    if not call.output_final_state:
        saved = saved._replace(final_kv=None, final_norm=None)
    if not call.normalize:
        saved = saved._replace(inverse=None, is_live=None)
    if not call.keeps_states:
        saved = saved._replace(chunk_kv=None, chunk_norm=None)
    return saved


@power_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    degree: int,
    normalize: bool,
    output_final_state: bool,
    chunk_size: int,
    keeps_states: bool,
    **_settings: Any,
) -> tuple[Tensor, ...]:
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    final_kv = final_norm = inverse = is_live = chunk_kv = chunk_norm = None
    # The layout depends on K, so K is a number even where other sizes are symbolic.
    P = state_features(int(K), degree) if output_final_state or keeps_states else 0
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if output_final_state:
        final_kv, final_norm = like.new_empty(S, G, P, V), like.new_empty(S, G, P)
    if normalize:
        inverse, is_live = like.new_empty(B, T, H), like.new_empty(B, T, H, dtype=torch.bool)
    if keeps_states:
        # As cost.py has it, for sizes that may be symbolic.
        num = B * (-(-T // chunk_size)) if cu_seqlens is None else T // chunk_size + S
        # Not of float16: its products have operands of float32.
        chunk_kv = (q if q.dtype == torch.bfloat16 else like).new_empty(num, G, P, V)
        has_norm = normalize or output_final_state
        chunk_norm = like.new_empty((num, G, P) if has_norm else (0,))
    results = Forward(
        q.new_empty(B, T, H, V), final_kv, final_norm, inverse, is_live, chunk_kv, chunk_norm
    )
    return tuple(_or_empty(x, q) for x in results)


@power_backward.register_fake
def _(*tensors: Any, needs: list[bool], **_settings: Any) -> tuple[Tensor, ...]:
    wanted = (x if need else None for x, need in zip(tensors[:6], needs, strict=True))
    return tuple(tensors[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    # Saved: inputs, output, final state, denominators, perhaps states. Recomputed: the rest.
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)
    ctx.settings = keyword_only_inputs


def _backward(
    ctx: Any, dout: Tensor | None, dkv: Tensor | None, dnorm: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if not ctx.settings["output_final_state"]:
        # torch.compile also passes gradients of absent results.
        dkv = dnorm = None
    needs = list(ctx.needs_input_grad[:6])
    grads = power_backward(*ctx.saved_tensors, dout, dkv, dnorm, needs=needs, **ctx.settings)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


power_forward.register_autograd(_backward, setup_context=_setup_context)


def _lengths(q: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Tokens of every sequence. Offsets without values count as documents of equal length."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return [T] * B
    if type(cu_seqlens) is Tensor and not cu_seqlens.is_meta:
        return [end - start for start, end in pairwise(cu_seqlens.tolist())]
    N = cu_seqlens.shape[0] - 1
    return [T // N] * N


def _flops(
    count: Callable[..., int], q: Tensor, v: Tensor, cu_seqlens: Tensor | None, settings: Any
) -> int:
    sizes = (q.shape[3], v.shape[3], settings["degree"], settings["form"], settings["chunk_size"])
    return q.shape[2] * sum(count(T, *sizes) for T in _lengths(q, cu_seqlens))


@register_flop_formula(_OPS.power_forward, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any, **settings: Any
) -> int:
    return _flops(power_flops, q, v, rest[3], settings)


@register_flop_formula(_OPS.power_backward, get_raw=True)
def _backward_flops(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any, **settings: Any
) -> int:
    return _flops(power_backward_flops, q, v, rest[3], settings)


def state_call(degree: int, chunk_size: int) -> PowerCall:
    """The settings of a call that computes only the state."""
    return PowerCall(
        degree=degree, scale=1.0, normalize=False, output_final_state=True,
        form="chunked", chunk_size=chunk_size,
    )  # fmt: skip


@torch.library.custom_op(f"{_NAMESPACE}::power_state", mutates_args=(), schema=_STATE_FORWARD)
def power_state(*inputs: Any, degree: int, chunk_size: int, backend: str) -> tuple[Tensor, Tensor]:
    """kv and norm after the last token of every sequence."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        state: PowerState = implementation(backend).state_forward(
            state_call(degree, chunk_size), *inputs
        )
    return state.kv, state.norm


@torch.library.custom_op(
    f"{_NAMESPACE}::power_state_backward", mutates_args=(), schema=_STATE_BACKWARD
)
def power_state_backward(
    *tensors: Any, needs: list[bool], degree: int, chunk_size: int, backend: str
) -> tuple[Tensor, ...]:
    """Gradients of k, v, log_g, kv and norm."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        grads = implementation(backend).state_backward(
            state_call(degree, chunk_size), SavedState(*tensors[:8]), *tensors[8:]
        )
    wanted = (x if need else None for x, need in zip(grads, needs, strict=True))
    return _in_dtypes_of(tensors, wanted, tensors[0])


@power_state.register_fake
def _(
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    degree: int,
    **_settings: Any,
) -> tuple[Tensor, Tensor]:
    B, _, G, K = k.shape
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    P = state_features(int(K), degree)
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    return like.new_empty(S, G, P, v.shape[3]), like.new_empty(S, G, P)


@power_state_backward.register_fake
def _(*tensors: Any, needs: list[bool], **_settings: Any) -> tuple[Tensor, ...]:
    wanted = (x if need else None for x, need in zip(tensors[:5], needs, strict=True))
    return tuple(tensors[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _state_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    # Saved: inputs, final state. Recomputed: features. States before chunks are not needed.
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)
    ctx.settings = keyword_only_inputs


def _state_backward(
    ctx: Any, dkv: Tensor | None, dnorm: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:5])
    if dkv is None and dnorm is None:
        return (None,) * 6
    grads = power_state_backward(*ctx.saved_tensors, dkv, dnorm, needs=needs, **ctx.settings)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


power_state.register_autograd(_state_backward, setup_context=_state_context)


@register_flop_formula(_OPS.power_state, get_raw=True)
def _state_flops(k: Tensor, v: Tensor, *rest: Any, out_val: Any, degree: int, **_: Any) -> int:
    sizes = k.shape[3], v.shape[3], degree
    return k.shape[2] * sum(power_state_flops(T, *sizes) for T in _lengths(k, rest[3]))


@register_flop_formula(_OPS.power_state_backward, get_raw=True)
def _state_backward_flops(*tensors: Any, out_val: Any, **settings: Any) -> int:
    return 2 * _state_flops(*tensors[:6], out_val=out_val, **settings)
