"""Backward of the attention form: scores are recomputed, once for queries and once for keys.

The factor of a row is c_t = scale · den_t^(−1/p), so that |w / den| = |c_t z|^p ≤ 1, eq. (17).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Gates, cut, load_chunk, sum_gates
from longhaul.kernels.common.triton.launch import launch, strides, with_dense_rows
from longhaul.kernels.common.triton.rows import load_rows, sum_of_products
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.triton.attention.forward import (
    constants_of,
    decay_root,
    longest_first,
    roots_to_end,
)
from longhaul.kernels.power.triton.attention.keys import attention_key_gradients, score_gradient
from longhaul.kernels.power.triton.delta import row_delta
from longhaul.kernels.power.triton.gates import gate_gradient
from longhaul.kernels.power.triton.tile_sizes import ATTENTION_QUERY_GRADIENT


def attention_backward(
    call: PowerCall, saved: Saved, dout: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and log_g, None where not needed."""
    needs_gates = saved.log_g is not None and needs[3]
    needs_keys = needs[1] or needs[2] or needs_gates
    if not (needs[0] or needs_keys):
        return None, None, None, None
    q, k, v = (with_dense_rows(x) for x in (saved.q, saved.k, saved.v))
    dout = with_dense_rows(dout)
    B, T, G = k.shape[:3]
    delta = row_delta(dout, saved.out, saved.is_live)
    whole = cut(B, T, T, saved.cu_seqlens, q.device)
    gates = None if saved.log_g is None else sum_gates(saved.log_g, whole)
    rows = (saved.inverse, delta)
    q_dq = q.new_empty(q.shape[:3], dtype=torch.float32) if needs_gates else None
    dq = dk = dv = dlog_g = None
    if needs[0] or needs_gates:
        dq = _query_gradient(call, q, k, v, dout, rows, gates, saved.cu_seqlens, q_dq)
    if needs_keys:
        k_dk = q.new_empty(B, G, T, dtype=torch.float32) if needs_gates else None
        dk, dv = attention_key_gradients(call, q, k, v, dout, rows, gates, saved.cu_seqlens, k_dk)
        if saved.log_g is not None and k_dk is not None:
            dlog_g = saved.log_g.new_empty(saved.log_g.shape)
            nothing = k_dk.new_zeros(whole.num, G, dtype=torch.float64)
            gate_gradient(q_dq, k_dk, nothing, saved.log_g, whole, call.degree, dlog_g)
    grads = (dq, dk, dv, dlog_g)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=False))  # type: ignore[return-value]


def _query_gradient(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    gates: Gates | None,
    cu_seqlens: Tensor | None,
    q_dq: Tensor | None,
) -> Tensor:
    """dq; fills q_dq (B, T, H) with q·dq."""
    B, T, H = q.shape[:3]
    block = ATTENTION_QUERY_GRADIENT.of(q, v)
    queries = longest_first(B, T, block.queries, cu_seqlens, q.device)
    to_end = None
    if gates is not None:
        to_end = roots_to_end(gates, cut(B, T, block.keys, cu_seqlens, q.device), call.degree)
    dq = q.new_empty(q.shape)
    launch(
        _power_bwd_attention_query_kernel,
        lambda _: (queries.num * H,),
        block.candidates, q, k, v, dout, dq, q_dq, *rows, None if gates is None else gates.high,
        None if gates is None else gates.low, to_end, queries.table, call.scale, T, H,
        H // k.shape[2], *strides(q, k, v, dout),
        **constants_of(call, q, v, block),
    )  # fmt: skip
    return dq


@triton.jit
def _power_bwd_attention_query_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, q_dq_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr,
    to_end_ptr, table_ptr, scale, T, H, REPEAT,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_dout_b, stride_dout_t, stride_dout_h,
    K: tl.constexpr, V: tl.constexpr, DEGREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    WHOLE_K: tl.constexpr = None if K == BLOCK_K else K
    WHOLE_V: tl.constexpr = None if V == BLOCK_V else V
    chunk, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    _, batch, start, end, first, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    g = h // REPEAT
    length = (end - start).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    q_ptr += batch * stride_q_b + start * stride_q_t + h * stride_q_h
    dout_ptr += batch * stride_dout_b + start * stride_dout_t + h * stride_dout_h
    k_ptr += batch * stride_k_b + first * stride_k_t + g * stride_k_h
    v_ptr += batch * stride_v_b + first * stride_v_t + g * stride_v_h
    gate_off = (batch * (H // REPEAT) + g) * T
    row_off = (batch * T + start + m) * H + h

    q = load_rows(q_ptr, m, m < length, stride_q_t, kk, K).to(DOT)
    dout = load_rows(dout_ptr, m, m < length, stride_dout_t, vv, V).to(DOT)
    factor = tl.full((BLOCK_M,), 1.0, tl.float32) * scale
    delta = tl.zeros((BLOCK_M,), tl.float32)
    if inverse_ptr is not None:
        factor *= tl.load(inverse_ptr + row_off, mask=m < length, other=0.0)
        delta = tl.load(delta_ptr + row_off, mask=m < length, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)

    # Decays are factored as in the forward pass: to the end of the block of keys, to b, to t.
    from_start = factor
    if high_ptr is not None:
        high_ptr += gate_off
        low_ptr += gate_off
        to_end_ptr += gate_off + first
        high_b, low_b = tl.load(high_ptr + start), tl.load(low_ptr + start)
        high_m = tl.load(high_ptr + start + m, mask=m < length, other=0.0)
        low_m = tl.load(low_ptr + start + m, mask=m < length, other=0.0)
        from_start *= decay_root(high_m - high_b, low_m - low_b, DEGREE)
    last = first + (BLOCK_N - 1)
    for _ in range(((start - first) // BLOCK_N).to(tl.int32)):
        k = load_rows(k_ptr, n, None, stride_k_t, kk, WHOLE_K).to(DOT)
        v = load_rows(v_ptr, n, None, stride_v_t, vv, WHOLE_V).to(DOT)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        row = from_start
        root = tl.full((1, BLOCK_N), 1.0, tl.float32)
        if high_ptr is not None:
            row *= decay_root(
                high_b - tl.load(high_ptr + last), low_b - tl.load(low_ptr + last), DEGREE
            )
            root = tl.load(to_end_ptr + n)[None, :]
            to_end_ptr += BLOCK_N
            last += BLOCK_N
        ds = score_gradient(s, dp, root, row[:, None], (row * delta)[:, None], DEGREE)
        acc += tl.dot(ds.to(DOT), k, input_precision=PRECISION)
        k_ptr += BLOCK_N * stride_k_t
        v_ptr += BLOCK_N * stride_v_t

    d = tl.arange(0, BLOCK_D)
    for block in tl.range(0, tl.cdiv(length, BLOCK_D), num_stages=1):
        i = block * BLOCK_D + d
        left = length - block * BLOCK_D
        k = load_rows(k_ptr, d, d < left, stride_k_t, kk, K).to(DOT)
        v = load_rows(v_ptr, d, d < left, stride_v_t, vv, V).to(DOT)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        root = tl.full((1, 1), 1.0, tl.float32)
        if high_ptr is not None:
            high_d = tl.load(high_ptr + start + i, mask=i < length, other=0.0)
            low_d = tl.load(low_ptr + start + i, mask=i < length, other=0.0)
            root = decay_root(
                high_m[:, None] - high_d[None, :], low_m[:, None] - low_d[None, :], DEGREE
            )
        root = tl.where(i[None, :] <= m[:, None], root, 0.0)
        ds = score_gradient(s, dp, root, factor[:, None], (factor * delta)[:, None], DEGREE)
        acc += tl.dot(ds.to(DOT), k, input_precision=PRECISION)
        k_ptr += BLOCK_D * stride_k_t
        v_ptr += BLOCK_D * stride_v_t

    acc *= DEGREE
    tl.store(
        dq_ptr + row_off[:, None] * K + kk[None, :],
        acc.to(dq_ptr.dtype.element_ty),
        mask=(m < length)[:, None] & (kk < K)[None, :],
    )
    if q_dq_ptr is not None:
        # Loaded again, as the keys are in keys.py.
        q = load_rows(q_ptr, m, m < length, stride_q_t, kk, K)
        tl.store(q_dq_ptr + row_off, sum_of_products(q.to(tl.float32), acc, 1), mask=m < length)
