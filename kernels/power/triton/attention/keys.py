"""Gradients of keys and values in the attention form: one program per block of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Gates, cut, exp2_flushed, load_chunk
from longhaul.kernels.common.triton.launch import launch, strides
from longhaul.kernels.common.triton.rows import load_rows, sum_of_products
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.triton.attention.forward import (
    constants_of,
    decay_root,
)
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.power.triton.tile_sizes import ATTENTION_KEY_GRADIENT


def attention_key_gradients(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    gates: Gates | None,
    cu_seqlens: Tensor | None,
    k_dk: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """dk and dv; fills k_dk (B, G, T) with k·dk."""
    B, T, H = q.shape[:3]
    G = k.shape[2]
    block = ATTENTION_KEY_GRADIENT.of(q, v)
    inverse, delta = rows
    factor = q.new_empty(B, H, T, dtype=torch.float32)
    factor_delta = None if delta is None else torch.empty_like(factor)
    tiles = cut(B, T, block.queries, cu_seqlens, q.device)
    _power_bwd_attention_rows_kernel[(tiles.num * H,)](
        inverse, delta, None if gates is None else gates.high, None if gates is None else gates.low,
        factor, factor_delta, tiles.table, call.scale, T, H, H // G,
        DEGREE=call.degree,
        BLOCK=block.queries,
        num_warps=1,
    )  # fmt: skip
    # In order: the first keys have the most queries and should start first.
    keys = cut(B, T, block.keys, cu_seqlens, q.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    launch(
        _power_bwd_attention_key_kernel,
        lambda _: (keys.num * G,),
        block.candidates, q, k, v, dout, dk, dv, k_dk, inverse, delta, factor, factor_delta,
        None if gates is None else gates.high, None if gates is None else gates.low, keys.table,
        call.scale, T, H, G, *strides(q, k, v, dout),
        **constants_of(call, q, v, block),
    )  # fmt: skip
    return dk, dv


@triton.jit
def score_gradient(s, dp, root, factor, factor_delta, DEGREE: tl.constexpr):
    """z^(p−1) dz/ds (dp − delta) for z = s · root · factor: p times that is ds, eq. (17)."""
    if DEGREE == 1:
        return root * (dp * factor - factor_delta)
    elif DEGREE == 2:  # noqa: RET505
        # The same with one multiplication less, as factors are squared separately.
        return (s * (root * root)) * (dp * (factor * factor) - factor_delta * factor)
    else:
        return power(s * root * factor, DEGREE - 1) * (root * (dp * factor - factor_delta))


@triton.jit
def _power_bwd_attention_rows_kernel(
    inverse_ptr, delta_ptr, high_ptr, low_ptr, factor_ptr, factor_delta_ptr, table_ptr,
    scale, T, H, REPEAT, DEGREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each query, its factor times the root of its decay from its block's first token, and that
    times delta, both (B, H, T). The loop over queries reads them once for every block of keys.
    """
    chunk, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    t = tl.arange(0, BLOCK)
    mask = t < (end - start)
    row_off = (batch * T + start + t) * H + h
    factor = tl.full((BLOCK,), 1.0, tl.float32) * scale
    if high_ptr is not None:
        gate_off = (batch * (H // REPEAT) + h // REPEAT) * T + start
        high_b = tl.load(high_ptr + gate_off, mask=start < end, other=0.0)
        low_b = tl.load(low_ptr + gate_off, mask=start < end, other=0.0)
        high = tl.load(high_ptr + gate_off + t, mask=mask, other=0.0)
        low = tl.load(low_ptr + gate_off + t, mask=mask, other=0.0)
        factor *= decay_root(high - high_b, low - low_b, DEGREE)
    if inverse_ptr is not None:
        factor *= tl.load(inverse_ptr + row_off, mask=mask, other=0.0)
    out_off = (batch * H + h) * T + start + t
    tl.store(factor_ptr + out_off, factor, mask=mask)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row_off, mask=mask, other=0.0)
        tl.store(factor_delta_ptr + out_off, factor * delta, mask=mask)


@triton.jit
def _power_bwd_attention_key_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, k_dk_ptr, inverse_ptr, delta_ptr,
    factor_ptr, factor_delta_ptr, high_ptr, low_ptr, table_ptr, scale, T, H, G,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_dout_b, stride_dout_t, stride_dout_h,
    K: tl.constexpr, V: tl.constexpr, DEGREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_N % BLOCK_M == 0)
    chunk, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    _, batch, start, end, _, last = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    repeat = H // G
    length = (end - start).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    k_ptr += batch * stride_k_b + start * stride_k_t + g * stride_k_h
    v_ptr += batch * stride_v_b + start * stride_v_t + g * stride_v_h
    q_ptr += batch * stride_q_b + start * stride_q_t + g * repeat * stride_q_h
    dout_ptr += batch * stride_dout_b + start * stride_dout_t + g * repeat * stride_dout_h
    gate_off = (batch * G + g) * T
    if high_ptr is not None:
        high_ptr += gate_off + start
        low_ptr += gate_off + start
        high_e, low_e = tl.load(high_ptr + length - 1), tl.load(low_ptr + length - 1)

    k = load_rows(k_ptr, n, n < length, stride_k_t, kk, K).to(DOT)
    v = load_rows(v_ptr, n, n < length, stride_v_t, vv, V).to(DOT)
    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)

    # Queries after the block. The decay has three factors: from the key to e, the block's last
    # token, applied after the loop; from e to the block of queries; from there to the query.
    rest = tl.maximum((last - start).to(tl.int32) - BLOCK_N, 0)
    factor_ptr += (batch * H + g * repeat) * T + start + BLOCK_N
    if factor_delta_ptr is not None:
        factor_delta_ptr += (batch * H + g * repeat) * T + start + BLOCK_N
    first_q_ptr = q_ptr
    first_dout_ptr = dout_ptr
    for _ in range(repeat):
        head_q_ptr = q_ptr + BLOCK_N * stride_q_t
        head_dout_ptr = dout_ptr + BLOCK_N * stride_dout_t
        for block in range(tl.cdiv(rest, BLOCK_M)):
            t = block * BLOCK_M + m
            left = rest - block * BLOCK_M
            q = load_rows(head_q_ptr, m, m < left, stride_q_t, kk, K).to(DOT)
            dout = load_rows(head_dout_ptr, m, m < left, stride_dout_t, vv, V).to(DOT)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            factor = tl.load(factor_ptr + t, mask=t < rest, other=0.0)
            factor_delta = tl.zeros((BLOCK_M,), tl.float32)
            if factor_delta_ptr is not None:
                factor_delta = tl.load(factor_delta_ptr + t, mask=t < rest, other=0.0)
            if high_ptr is not None:
                high_b = tl.load(high_ptr + BLOCK_N + block * BLOCK_M)
                low_b = tl.load(low_ptr + BLOCK_N + block * BLOCK_M)
                root = decay_root(high_b - high_e, low_b - low_e, DEGREE)
                factor *= root
                factor_delta *= root
            ds = dp * factor[None, :] - factor_delta[None, :]
            w = s * factor[None, :]
            if DEGREE > 1:
                lower = power(w, DEGREE - 1)
                ds *= lower
                w *= lower
            dv += tl.dot(w.to(DOT), dout, input_precision=PRECISION)
            dk += tl.dot(ds.to(DOT), q, input_precision=PRECISION)
            head_q_ptr += BLOCK_M * stride_q_t
            head_dout_ptr += BLOCK_M * stride_dout_t
        q_ptr += stride_q_h
        dout_ptr += stride_dout_h
        factor_ptr += T
        if factor_delta_ptr is not None:
            factor_delta_ptr += T
    if high_ptr is not None:
        high_n = tl.load(high_ptr + n, mask=n < length, other=0.0)
        low_n = tl.load(low_ptr + n, mask=n < length, other=0.0)
        decay = exp2_flushed((high_e - high_n) + (low_e - low_n))
        # Before a reset a weight without this decay may be infinite.
        dk = tl.where((decay > 0.0)[:, None], dk * decay[:, None], 0.0)
        dv = tl.where((decay > 0.0)[:, None], dv * decay[:, None], 0.0)

    # The block's own queries, with a matrix of decays.
    d = tl.arange(0, BLOCK_D)
    q_ptr = first_q_ptr
    dout_ptr = first_dout_ptr
    row_off = (batch * T + start) * H + g * repeat
    for _ in range(repeat):
        head_q_ptr = q_ptr
        head_dout_ptr = dout_ptr
        for block in tl.range(0, tl.cdiv(length, BLOCK_D), num_stages=1):
            t = block * BLOCK_D + d
            left = length - block * BLOCK_D
            q = load_rows(head_q_ptr, d, d < left, stride_q_t, kk, K).to(DOT)
            dout = load_rows(head_dout_ptr, d, d < left, stride_dout_t, vv, V).to(DOT)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            factor = tl.full((BLOCK_D,), 1.0, tl.float32) * scale
            factor_delta = tl.zeros((BLOCK_D,), tl.float32)
            if inverse_ptr is not None:
                factor *= tl.load(inverse_ptr + row_off + t * H, mask=t < length, other=0.0)
                factor_delta = factor * tl.load(
                    delta_ptr + row_off + t * H, mask=t < length, other=0.0
                )
            root = tl.full((1, 1), 1.0, tl.float32)
            if high_ptr is not None:
                high_d = tl.load(high_ptr + t, mask=t < length, other=0.0)
                low_d = tl.load(low_ptr + t, mask=t < length, other=0.0)
                root = decay_root(
                    high_d[None, :] - high_n[:, None], low_d[None, :] - low_n[:, None], DEGREE
                )
            root = tl.where(n[:, None] <= t[None, :], root, 0.0)
            w = power(s * root * factor[None, :], DEGREE)
            ds = score_gradient(s, dp, root, factor[None, :], factor_delta[None, :], DEGREE)
            dv += tl.dot(w.to(DOT), dout, input_precision=PRECISION)
            dk += tl.dot(ds.to(DOT), q, input_precision=PRECISION)
            head_q_ptr += BLOCK_D * stride_q_t
            head_dout_ptr += BLOCK_D * stride_dout_t
        q_ptr += stride_q_h
        dout_ptr += stride_dout_h
        row_off += 1

    dk *= DEGREE
    row_off = (batch * T + start + n) * G + g
    tl.store(
        dk_ptr + row_off[:, None] * K + kk[None, :],
        dk.to(dk_ptr.dtype.element_ty),
        mask=(n < length)[:, None] & (kk < K)[None, :],
    )
    if k_dk_ptr is not None:
        # Load the keys again, since keeping them would take registers from the loops. The store
        # above stops the compiler from merging both loads.
        k = load_rows(k_ptr, n, n < length, stride_k_t, kk, K)
        k_dk = sum_of_products(k.to(tl.float32), dk, 1)
        tl.store(k_dk_ptr + gate_off + start + n, k_dk, mask=n < length)
    tl.store(
        dv_ptr + row_off[:, None] * V + vv[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=(n < length)[:, None] & (vv < V)[None, :],
    )
