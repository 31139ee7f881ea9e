"""The attention form at degrees 1 and 2 in float32 on a CPU, without states: one call of C++ each
way."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from longhaul.kernels import native
from longhaul.kernels.power.call import Forward, PowerCall, Saved
from longhaul.kernels.power.torch.chunked.backward import Gradients
from longhaul.kernels.power.torch.chunking import CallSizes, log2_sums
from longhaul.kernels.power.torch.compiled import attends, functions
from longhaul.kernels.power.torch.gates import gate_gradient
from longhaul.kernels.shapes import DENOMINATOR_FLOOR


def serves(call: PowerCall, *tensors: Tensor | None) -> bool:
    """Whether the functions below serve a call with q, k and v, or also with dout."""
    given = [x for x in tensors if x is not None]
    return (
        call.form == "attention"
        and not call.output_final_state
        and attends(call.degree, given[0])
        and native.serves(*given)
        and all(x.numel() > 0 for x in given)
    )


def forward(
    call: PowerCall, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, into: Forward
) -> None:
    """Fill the output, and the denominators for the backward pass."""
    problem = CallSizes.of(call, q, v)
    log_decay = None if log_g is None else log2_sums(log_g, problem, q.dtype).contiguous()
    call_compiled(
        "attention_form",
        problem,
        [q, k, v, log_decay],
        [into.out, into.inverse, into.is_live],
    )


def backward(call: PowerCall, saved: Saved, dout: Tensor | None, into: Gradients) -> None:
    """Fill the gradients of q, k, v and the gates."""
    problem = CallSizes.of(call, saved.q, saved.v)
    log_decay = (
        None if saved.log_g is None else log2_sums(saved.log_g, problem, into.dq.dtype).contiguous()
    )
    dout = torch.zeros_like(saved.out) if dout is None else dout
    row_sums, k_dk = into.dq.new_empty(dout.shape[:3]), into.dk.new_empty(into.dk.shape[:3])
    inputs = [saved.q, saved.k, saved.v, log_decay, saved.out, dout, saved.inverse, saved.is_live]
    call_compiled(
        "attention_form_backward",
        problem,
        inputs,
        [into.dq, into.dk, into.dv, row_sums, k_dk],
    )
    if saved.log_g is not None and into.dlog_g is not None:
        sums = row_sums.double().unflatten(2, (problem.G, -1)).sum(dim=3)
        into.dlog_g.copy_(gate_gradient(saved.log_g, sums, k_dk, problem.degree, ()))


class _Tokens(Structure):
    """Tokens of attention_form.h."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("token", c_int64), ("head", c_int64))


class _Sizes(Structure):
    """Sizes of attention_form.h."""

    _fields_ = (
        *((name, c_int) for name in ("B", "T", "G", "R", "K", "V", "C", "blocks")),
        *((name, c_int) for name in ("S", "normalize", "degree")),
        ("scale", c_float),
        ("floor", c_float),
    )


def call_compiled(
    name: str,
    problem: CallSizes,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    *,
    num_sums: int = 1,
) -> None:
    """Call a function with tensors (B, T, heads, width) or (B, T, heads); float64 is passed as
    it is."""
    # Widths have to be innermost. Copies live until the call has ended.
    plain = [x if x is None or _has_innermost_width(x) else x.contiguous() for x in inputs]
    assert all(x is None or _has_innermost_width(x) for x in outputs)
    sizes = _Sizes(
        *(problem.B, problem.T, problem.G, problem.R, problem.K, problem.V),
        *(problem.block_size, problem.blocks_per_chunk, num_sums),
        *(problem.normalize, problem.degree),
        *(problem.scale, DENOMINATOR_FLOOR),
    )
    arguments = (
        None
        if x is None
        else x.data_ptr()
        if x.dtype == torch.float64
        else byref(_Tokens(x.data_ptr(), *x.stride()[:3]))
        for x in (*plain, *outputs)
    )
    getattr(functions(), name)(*arguments, byref(sizes), torch.get_num_threads())


def _has_innermost_width(x: Tensor) -> bool:
    return x.ndim < 4 or x.shape[3] == 1 or x.stride(3) == 1
