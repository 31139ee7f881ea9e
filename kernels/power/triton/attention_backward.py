"""Gradients of the attention form: scores are taken anew, once for queries and once for keys.

A row's own factor is c_t = scale · den_t^(−1/p), so that w / den = (c_t z)^p ≤ 1 in size, eq. (18).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.triton.attention import (
    Blocks,
    decay_root,
    load_rows,
    longest_first,
    power,
    roots_to_end,
)
from longhaul.kernels.power.triton.delta import row_terms
from longhaul.kernels.power.triton.gates import gate_gradient
from longhaul.kernels.power.triton.launch import (
    block_of,
    config,
    is_interpreted,
    launch,
    operands_of,
    with_dense_rows,
)
from longhaul.kernels.power.triton.sequences import Gates, cut, exp2_flushed, load_chunk, sum_gates

# Chosen by what compiles without spills, not yet by time. For dq, and for dk and dv.
_NARROW = (  # 16 bits, K and V to 64
    Blocks(128, 64, (config(8, 3, BLOCK_D=32), config(8, 2, BLOCK_D=32))),
    Blocks(32, 128, (config(8, 2, BLOCK_D=32),)),
)
_WIDE = (  # to 128
    Blocks(64, 32, (config(4, 2, BLOCK_D=32),)),
    Blocks(32, 64, (config(8, 2, BLOCK_D=16),)),
)
_WIDEST = (  # to 256
    Blocks(64, 32, (config(4, 2, BLOCK_D=16),)),
    Blocks(32, 64, (config(8, 2, BLOCK_D=16),)),
)
_NARROW_32 = (
    Blocks(64, 32, (config(4, 2, BLOCK_D=16),)),
    Blocks(32, 64, (config(4, 2, BLOCK_D=16),)),
)
_WIDE_32 = (
    Blocks(32, 32, (config(4, 2, BLOCK_D=16),)),
    Blocks(32, 32, (config(4, 2, BLOCK_D=16),)),
)
_INTERPRETED = (
    Blocks(32, 16, (config(4, 1, BLOCK_D=8),)),
    Blocks(16, 32, (config(4, 1, BLOCK_D=8),)),
)


def _blocks(q: Tensor, width: int) -> tuple[Blocks, Blocks]:
    if is_interpreted():
        return _INTERPRETED
    if q.dtype == torch.bfloat16:
        return _NARROW if width <= 64 else _WIDE if width <= 128 else _WIDEST
    return _NARROW_32 if width <= 64 else _WIDE_32


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
    pull, change = row_terms(dout, saved.out, saved.is_live)
    whole = cut(B, T, T, saved.cu_seqlens, q.device)
    gates = None if saved.log_g is None else sum_gates(saved.log_g, whole)
    rows = (saved.inverse, pull)
    dq = dk = dv = dlog_g = None
    if needs[0]:
        dq = _query_gradient(call, q, k, v, dout, rows, gates, saved.cu_seqlens)
    if needs_keys:
        k_dk = q.new_empty(B, G, T, dtype=torch.float32) if needs_gates else None
        dk, dv = _key_gradients(call, q, k, v, dout, rows, gates, saved.cu_seqlens, k_dk)
        if saved.log_g is not None and k_dk is not None:
            dlog_g = saved.log_g.new_empty(saved.log_g.shape)
            nothing = k_dk.new_zeros(whole.num, G, dtype=torch.float64)
            gate_gradient(change, k_dk, nothing, saved.log_g, whole, call.degree, dlog_g)
    return dq, dk if needs[1] else None, dv if needs[2] else None, dlog_g


def _sizes(call: PowerCall, q: Tensor, v: Tensor, blocks: Blocks) -> dict[str, Any]:
    operands = operands_of(q)
    return {
        "K": q.shape[3],
        "V": v.shape[3],
        "DEGREE": call.degree,
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "BLOCK_K": block_of(q.shape[3]),
        "BLOCK_V": block_of(v.shape[3]),
        "DOT": operands.dtype,
        "PRECISION": operands.precision,
    }


def _query_gradient(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    gates: Gates | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    B, T, H, K = q.shape
    blocks, _ = _blocks(q, block_of(max(K, v.shape[3])))
    queries = longest_first(B, T, blocks.queries, cu_seqlens, q.device)
    to_end = None
    if gates is not None:
        to_end = roots_to_end(gates, cut(B, T, blocks.keys, cu_seqlens, q.device), call.degree)
    dq = q.new_empty(q.shape)
    launch(
        _power_bwd_attention_query_kernel,
        lambda _: (queries.num * H,),
        blocks.configs,
        q,
        k,
        v,
        dout,
        dq,
        *rows,
        None if gates is None else gates.high,
        None if gates is None else gates.low,
        to_end,
        queries.table,
        call.scale,
        T,
        H,
        H // k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        **_sizes(call, q, v, blocks),
    )
    return dq


def _key_gradients(
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
    """dk and dv; fills k_dk (B, G, T), the products of keys with their gradients."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    _, blocks = _blocks(q, block_of(max(K, V)))
    inverse, pull = rows
    factor = q.new_empty(B, H, T, dtype=torch.float32)
    factor_pull = None if pull is None else torch.empty_like(factor)
    tiles = cut(B, T, blocks.queries, cu_seqlens, q.device)
    _power_bwd_attention_rows_kernel[(tiles.num * H,)](
        inverse,
        pull,
        None if gates is None else gates.high,
        None if gates is None else gates.low,
        factor,
        factor_pull,
        tiles.table,
        call.scale,
        T,
        H,
        H // G,
        DEGREE=call.degree,
        BLOCK=blocks.queries,
        num_warps=1,
    )
    # In this order, the first keys meet most queries, and start first.
    keys = cut(B, T, blocks.keys, cu_seqlens, q.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    launch(
        _power_bwd_attention_key_kernel,
        lambda _: (keys.num * G,),
        blocks.configs,
        q,
        k,
        v,
        dout,
        dk,
        dv,
        k_dk,
        inverse,
        pull,
        factor,
        factor_pull,
        None if gates is None else gates.high,
        None if gates is None else gates.low,
        keys.table,
        call.scale,
        T,
        H,
        G,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        **_sizes(call, q, v, blocks),
    )
    return dk, dv


@triton.jit
def _score_gradient(s, dp, root, factor, factor_pull, DEGREE: tl.constexpr):
    """z^(p−1) dz/ds (dp − pull) for z = s · root · factor: p times that is ds, eq. (18)."""
    if DEGREE == 1:
        return root * (dp * factor - factor_pull)
    elif DEGREE == 2:  # noqa: RET505
        # The same with a multiplication less, as factors can be squared apart.
        return (s * (root * root)) * (dp * (factor * factor) - factor_pull * factor)
    else:
        return power(s * root * factor, DEGREE - 1) * (root * (dp * factor - factor_pull))


@triton.jit
def _power_bwd_attention_query_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, inverse_ptr, pull_ptr, high_ptr, low_ptr, to_end_ptr,
    table_ptr, scale, T, H, REPEAT,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_dout_b, stride_dout_t, stride_dout_h,
    K: tl.constexpr, V: tl.constexpr, DEGREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    chunk, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    _, batch, start, end, first, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    g = h // REPEAT
    length = (end - start).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    q_ptr += batch * stride_q_b + start * stride_q_t + h * stride_q_h
    dout_ptr += batch * stride_dout_b + start * stride_dout_t + h * stride_dout_h
    k_ptr += batch * stride_k_b + first * stride_k_t + g * stride_k_h
    v_ptr += batch * stride_v_b + first * stride_v_t + g * stride_v_h
    gate_off = (batch * (H // REPEAT) + g) * T
    row_off = (batch * T + start + m) * H + h

    q = load_rows(q_ptr, stride_q_t, length, BLOCK_M, K, BLOCK_K, False).to(DOT)
    dout = load_rows(dout_ptr, stride_dout_t, length, BLOCK_M, V, BLOCK_V, False).to(DOT)
    factor = tl.full((BLOCK_M,), 1.0, tl.float32) * scale
    pull = tl.zeros((BLOCK_M,), tl.float32)
    if inverse_ptr is not None:
        factor *= tl.load(inverse_ptr + row_off, mask=m < length, other=0.0)
        pull = tl.load(pull_ptr + row_off, mask=m < length, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)

    # Decays are taken apart as in the forward pass: to the end of the block of keys, to b, on to t.
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
        k = load_rows(k_ptr, stride_k_t, BLOCK_N, BLOCK_N, K, BLOCK_K, True).to(DOT)
        v = load_rows(v_ptr, stride_v_t, BLOCK_N, BLOCK_N, V, BLOCK_V, True).to(DOT)
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
        ds = _score_gradient(s, dp, root, row[:, None], (row * pull)[:, None], DEGREE)
        acc += tl.dot(ds.to(DOT), k, input_precision=PRECISION)
        k_ptr += BLOCK_N * stride_k_t
        v_ptr += BLOCK_N * stride_v_t

    d = tl.arange(0, BLOCK_D)
    for block in tl.range(0, tl.cdiv(length, BLOCK_D), num_stages=1):
        i = block * BLOCK_D + d
        left = length - block * BLOCK_D
        k = load_rows(k_ptr, stride_k_t, left, BLOCK_D, K, BLOCK_K, False).to(DOT)
        v = load_rows(v_ptr, stride_v_t, left, BLOCK_D, V, BLOCK_V, False).to(DOT)
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
        ds = _score_gradient(s, dp, root, factor[:, None], (factor * pull)[:, None], DEGREE)
        acc += tl.dot(ds.to(DOT), k, input_precision=PRECISION)
        k_ptr += BLOCK_D * stride_k_t
        v_ptr += BLOCK_D * stride_v_t

    c = tl.arange(0, BLOCK_K)
    tl.store(
        dq_ptr + row_off[:, None] * K + c[None, :],
        (acc * DEGREE).to(dq_ptr.dtype.element_ty),
        mask=(m < length)[:, None] & (c < K)[None, :],
    )


@triton.jit
def _power_bwd_attention_rows_kernel(
    inverse_ptr, pull_ptr, high_ptr, low_ptr, factor_ptr, factor_pull_ptr, table_ptr,
    scale, T, H, REPEAT, DEGREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's factor with the root of its decay since its block's first token, and that times pull.

    Both (B, H, T): the loop over queries reads them once for every block of keys.
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
    if pull_ptr is not None:
        pull = tl.load(pull_ptr + row_off, mask=mask, other=0.0)
        tl.store(factor_pull_ptr + out_off, factor * pull, mask=mask)


@triton.jit
def _power_bwd_attention_key_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, k_dk_ptr, inverse_ptr, pull_ptr,
    factor_ptr, factor_pull_ptr, high_ptr, low_ptr, table_ptr, scale, T, H, G,
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
    k_ptr += batch * stride_k_b + start * stride_k_t + g * stride_k_h
    v_ptr += batch * stride_v_b + start * stride_v_t + g * stride_v_h
    q_ptr += batch * stride_q_b + start * stride_q_t + g * repeat * stride_q_h
    dout_ptr += batch * stride_dout_b + start * stride_dout_t + g * repeat * stride_dout_h
    gate_off = (batch * G + g) * T
    if high_ptr is not None:
        high_ptr += gate_off + start
        low_ptr += gate_off + start
        high_e, low_e = tl.load(high_ptr + length - 1), tl.load(low_ptr + length - 1)

    k = load_rows(k_ptr, stride_k_t, length, BLOCK_N, K, BLOCK_K, False).to(DOT)
    v = load_rows(v_ptr, stride_v_t, length, BLOCK_N, V, BLOCK_V, False).to(DOT)
    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)

    # Queries after the block. The decay from key to e, the block's last token, waits for the end
    # of the loop; from e to a block of queries it is one number; from there on a table has it.
    rest = tl.maximum((last - start).to(tl.int32) - BLOCK_N, 0)
    factor_ptr += (batch * H + g * repeat) * T + start + BLOCK_N
    if factor_pull_ptr is not None:
        factor_pull_ptr += (batch * H + g * repeat) * T + start + BLOCK_N
    for head in range(repeat):
        head_q_ptr = q_ptr + head * stride_q_h + BLOCK_N * stride_q_t
        head_dout_ptr = dout_ptr + head * stride_dout_h + BLOCK_N * stride_dout_t
        for block in range(tl.cdiv(rest, BLOCK_M)):
            t = block * BLOCK_M + m
            left = rest - block * BLOCK_M
            q = load_rows(head_q_ptr, stride_q_t, left, BLOCK_M, K, BLOCK_K, False).to(DOT)
            dout = load_rows(
                head_dout_ptr, stride_dout_t, left, BLOCK_M, V, BLOCK_V, False
            ).to(DOT)  # fmt: skip
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            factor = tl.load(factor_ptr + t, mask=t < rest, other=0.0)
            factor_pull = tl.zeros((BLOCK_M,), tl.float32)
            if factor_pull_ptr is not None:
                factor_pull = tl.load(factor_pull_ptr + t, mask=t < rest, other=0.0)
            if high_ptr is not None:
                high_b = tl.load(high_ptr + BLOCK_N + block * BLOCK_M)
                low_b = tl.load(low_ptr + BLOCK_N + block * BLOCK_M)
                root = decay_root(high_b - high_e, low_b - low_e, DEGREE)
                factor *= root
                factor_pull *= root
            ds = dp * factor[None, :] - factor_pull[None, :]
            w = s * factor[None, :]
            if DEGREE > 1:
                lower = power(w, DEGREE - 1)
                ds *= lower
                w *= lower
            dv += tl.dot(w.to(DOT), dout, input_precision=PRECISION)
            dk += tl.dot(ds.to(DOT), q, input_precision=PRECISION)
            head_q_ptr += BLOCK_M * stride_q_t
            head_dout_ptr += BLOCK_M * stride_dout_t
        factor_ptr += T
        if factor_pull_ptr is not None:
            factor_pull_ptr += T
    if high_ptr is not None:
        high_n = tl.load(high_ptr + n, mask=n < length, other=0.0)
        low_n = tl.load(low_ptr + n, mask=n < length, other=0.0)
        decay = exp2_flushed((high_e - high_n) + (low_e - low_n))
        # Before a reset a weight without its decay may be of any size, infinite too.
        dk = tl.where((decay > 0.0)[:, None], dk * decay[:, None], 0.0)
        dv = tl.where((decay > 0.0)[:, None], dv * decay[:, None], 0.0)

    # The block's own queries, pair by pair.
    d = tl.arange(0, BLOCK_D)
    for head in range(repeat):
        head_q_ptr = q_ptr + head * stride_q_h
        head_dout_ptr = dout_ptr + head * stride_dout_h
        row_off = (batch * T + start) * H + g * repeat + head
        for block in tl.range(0, tl.cdiv(length, BLOCK_D), num_stages=1):
            t = block * BLOCK_D + d
            left = length - block * BLOCK_D
            q = load_rows(head_q_ptr, stride_q_t, left, BLOCK_D, K, BLOCK_K, False).to(DOT)
            dout = load_rows(
                head_dout_ptr, stride_dout_t, left, BLOCK_D, V, BLOCK_V, False
            ).to(DOT)  # fmt: skip
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            factor = tl.full((BLOCK_D,), 1.0, tl.float32) * scale
            factor_pull = tl.zeros((BLOCK_D,), tl.float32)
            if inverse_ptr is not None:
                factor *= tl.load(inverse_ptr + row_off + t * H, mask=t < length, other=0.0)
                factor_pull = factor * tl.load(
                    pull_ptr + row_off + t * H, mask=t < length, other=0.0
                )
            root = tl.full((1, 1), 1.0, tl.float32)
            if high_ptr is not None:
                high_d = tl.load(high_ptr + t, mask=t < length, other=0.0)
                low_d = tl.load(low_ptr + t, mask=t < length, other=0.0)
                root = decay_root(
                    high_d[None, :] - high_n[:, None], low_d[None, :] - low_n[:, None], DEGREE
                )
            root = tl.where((n[:, None] <= t[None, :]) & (t < length)[None, :], root, 0.0)
            w = power(s * root * factor[None, :], DEGREE)
            ds = _score_gradient(s, dp, root, factor[None, :], factor_pull[None, :], DEGREE)
            dv += tl.dot(w.to(DOT), dout, input_precision=PRECISION)
            dk += tl.dot(ds.to(DOT), q, input_precision=PRECISION)
            head_q_ptr += BLOCK_D * stride_q_t
            head_dout_ptr += BLOCK_D * stride_dout_t

    dk *= DEGREE
    row_off = (batch * T + start + n) * G + g
    c = tl.arange(0, BLOCK_K)
    tl.store(
        dk_ptr + row_off[:, None] * K + c[None, :],
        dk.to(dk_ptr.dtype.element_ty),
        mask=(n < length)[:, None] & (c < K)[None, :],
    )
    if k_dk_ptr is not None:
        # Keys are read again: kept since the start they would take the loops' registers. That this
        # comes after a store stops the compiler from joining both reads.
        k = load_rows(k_ptr, stride_k_t, length, BLOCK_N, K, BLOCK_K, False)
        k_dk = tl.sum(k.to(tl.float32) * dk, axis=1)
        tl.store(k_dk_ptr + gate_off + start + n, k_dk, mask=n < length)
    c = tl.arange(0, BLOCK_V)
    tl.store(
        dv_ptr + row_off[:, None] * V + c[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=(n < length)[:, None] & (c < V)[None, :],
    )
