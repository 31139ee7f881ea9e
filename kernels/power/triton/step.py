"""The recurrent form: one token at constant cost, all sequences and heads in two kernels.

The first updates and reads the state, in parallel over its features too: with a batch of 1 there
are otherwise too few programs to keep a GPU's memory busy. The second adds up what was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import block_of, with_dense_rows
from longhaul.kernels.common.triton.rows import sum_of_products
from longhaul.kernels.power.state import HASH_MULTIPLIERS, PowerState
from longhaul.kernels.power.triton.features import features, tiles_of
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.shapes import DENOMINATOR_FLOOR

_FLOOR = tl.constexpr(DENOMINATOR_FLOOR)
_BY_NORM, _BY_COLUMN, _FINAL = (tl.constexpr(x) for x in HASH_MULTIPLIERS)
# Decoding is limited by reading and writing the state, so narrow blocks give more programs.
_BLOCK_V = 16
# At most about four for every multiprocessor of a large GPU.
_PROGRAMS = 512
_PARTS_AT_ONCE = 16


def take_step(
    state: PowerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    inplace: bool,
) -> tuple[Tensor, PowerState]:
    """Update the state, S_t = γ_t S_{t−1} + φ(k_t) v_tᵀ, and read it; q is (B, 1, H, K).

    kv may be bfloat16, and then stays so; anything else becomes float32.
    """
    B, _, H, K = q.shape
    G, V = v.shape[2:]
    q, k, v = with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)
    tiles = tiles_of(K, degree, q.device, q.dtype)
    kv = state.kv if state.kv.dtype == torch.bfloat16 else state.kv.float()
    kv, norm = kv.contiguous(), state.norm.float().contiguous()
    # In place, the program that writes a norm must be the only one that reads it.
    block_v = block_of(V) if inplace else min(block_of(V), _BLOCK_V)
    new_kv = kv if inplace else torch.empty_like(kv)
    new_norm = norm if inplace else torch.empty_like(norm)
    blocks_v = triton.cdiv(V, block_v)
    parts = min(max(_PROGRAMS // (B * G * blocks_v), 1), tiles.num_blocks)
    blocks_per_part = triton.cdiv(tiles.num_blocks, parts)
    parts = triton.cdiv(tiles.num_blocks, blocks_per_part)
    # Sums over a part's features of a head: V values, the denominator, and squares of the norm.
    sums = torch.empty(B * G, parts, H // G, V + 2, dtype=torch.float32, device=q.device)
    out = q.new_empty(B, 1, H, V)
    strides = (q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2))
    gate_strides = (0, 0) if log_g is None else (log_g.stride(0), log_g.stride(2))
    _power_fwd_step_kernel[(B * G, blocks_v, parts)](
        q, k, v, norm if log_g is None else log_g, kv, norm, new_kv, new_norm, sums, tiles.table,
        *strides, *gate_strides, G, K, V, tiles.P, tiles.num_blocks, blocks_per_part,
        REPEAT=H // G,
        DEGREE=degree,
        TILE=tiles.tile,
        AT_ONCE=tiles.at_once,
        BLOCK_F=tiles.at_once * tiles.tile**degree,
        BLOCK_R=triton.next_power_of_2(H // G),
        BLOCK_V=block_v,
        HAS_GATES=log_g is not None,
        NORMALIZE=normalize,
        IN_PLACE=inplace,
        # In place a block of the state is wide: 128 values, or 64 beside products of four
        # coordinates, do not fit in the registers of 4 warps.
        num_warps=8 if block_v > (32 if degree == 4 else 64) else 4,
    )  # fmt: skip
    _power_fwd_step_output_kernel[(B * H,)](
        q, k, v, sums, out, *strides, H, K, V, parts,
        scale, scale**degree, 4 * torch.finfo(torch.float32).eps,
        REPEAT=H // G,
        DEGREE=degree,
        BLOCK_K=block_of(K),
        BLOCK_V=block_of(V),
        BLOCK_PARTS=_PARTS_AT_ONCE,
        NORMALIZE=normalize,
    )  # fmt: skip
    if inplace and kv is not state.kv:
        state.kv.copy_(kv)
        state.norm.copy_(norm)
        return out, state
    return out, PowerState(new_kv, new_norm)


@triton.jit
def _power_fwd_step_kernel(
    q_ptr, k_ptr, v_ptr, log_g_ptr, kv_ptr, norm_ptr, new_kv_ptr, new_norm_ptr, sums_ptr, tiles_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    G, K, V, P, num_blocks, blocks_per_part,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, HAS_GATES: tl.constexpr,
    NORMALIZE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(2)
    r = tl.arange(0, BLOCK_R)
    v_mask = v < V
    r_mask = r < REPEAT
    q_ptr += b * stride_qb + g * REPEAT * stride_qh
    k_ptr += b * stride_kb + g * stride_kh
    state_off = (b * G + g) * P
    gate = 1.0
    if HAS_GATES:
        gate = tl.exp(tl.load(log_g_ptr + b * stride_gb + g * stride_gh).to(tl.float32))
    value = tl.load(v_ptr + b * stride_vb + g * stride_vh + v, mask=v_mask, other=0.0).to(
        tl.float32
    )  # fmt: skip
    one = tl.arange(0, 1)
    acc = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    den = tl.zeros((BLOCK_R,), tl.float32)
    norm_square = 0.0
    first = part * blocks_per_part
    for block in range(first, tl.minimum(first + blocks_per_part, num_blocks)):
        f = block * BLOCK_F + tl.arange(0, BLOCK_F)
        kv_off = (state_off + f)[:, None] * V + v[None, :]
        kv_mask = (f < P)[:, None] & v_mask[None, :]
        kv = gate * tl.load(kv_ptr + kv_off, mask=kv_mask, other=0.0).to(tl.float32)
        norm = gate * tl.load(norm_ptr + state_off + f, mask=f < P, other=0.0)
        if IN_PLACE:
            # Several warps may load the same entry, and one of them overwrites it below.
            tl.debug_barrier()
        phi_k = features(
            k_ptr, one, one < 1, tiles_ptr, block, K,
            DEGREE, TILE, AT_ONCE, False, False, tl.float32,
        )  # fmt: skip
        phi_k = tl.reshape(phi_k, (BLOCK_F,))
        phi_q = features(
            q_ptr, r * stride_qh, r_mask, tiles_ptr, block, K,
            DEGREE, TILE, AT_ONCE, False, True, tl.float32,
        )  # fmt: skip
        for repeat in tl.static_range(REPEAT):
            # A loop over heads avoids a product of heads × features × values.
            one_q = tl.sum(tl.where((r == repeat)[:, None], phi_q, 0.0), axis=0)
            read = sum_of_products(one_q[:, None], kv, 0)
            acc += tl.where((r == repeat)[:, None], read[None, :], 0.0)
        new_kv = kv + phi_k[:, None] * value[None, :]
        if new_kv_ptr.dtype.element_ty == tl.bfloat16:
            new_kv = _rounded(new_kv, norm + phi_k, v)
        tl.store(new_kv_ptr + kv_off, new_kv, mask=kv_mask)
        if NORMALIZE:
            den += sum_of_products(phi_q, norm[None, :], 1)
            if DEGREE > 1:
                tile = block * AT_ONCE + tl.arange(0, AT_ONCE)
                multiplicity = tl.load(tiles_ptr + tile * (DEGREE + 1) + DEGREE).to(tl.float32)
                norms = tl.reshape(norm, (AT_ONCE, BLOCK_F // AT_ONCE))
                norm_square += sum_of_products(sum_of_products(norms, norms, 1), multiplicity, 0)
        if tl.program_id(1) == 0:
            tl.store(new_norm_ptr + state_off + f, norm + phi_k, mask=f < P)
    parts = tl.cdiv(num_blocks, blocks_per_part)
    sums_off = (((b * G + g) * parts + part) * REPEAT + r) * (V + 2)
    tl.store(sums_ptr + sums_off[:, None] + v[None, :], acc, mask=r_mask[:, None] & v_mask[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums_ptr + sums_off + V, den, mask=r_mask)
        tl.store(sums_ptr + sums_off + V + 1, tl.zeros_like(den) + norm_square, mask=r_mask)


@triton.jit
def _power_fwd_step_output_kernel(
    q_ptr, k_ptr, v_ptr, sums_ptr, out_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    H, K, V, parts, scale, state_scale, rounding,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    g = h // REPEAT
    v = tl.arange(0, BLOCK_V)
    kk = tl.arange(0, BLOCK_K)
    one = tl.arange(0, 1)  # Sums are blocks of one number.
    acc = tl.zeros((BLOCK_V,), tl.float32)
    den = tl.zeros((1,), tl.float32)
    norm_square = tl.zeros((1,), tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        row = ((b * (H // REPEAT) + g) * parts + part) * REPEAT + h % REPEAT
        sums = sums_ptr + row[:, None] * (V + 2)
        mask = (part < parts)[:, None]
        read = tl.load(sums + v[None, :], mask=mask & (v < V)[None, :], other=0.0)
        acc += tl.sum(read, axis=0)
        if NORMALIZE:
            den += tl.sum(tl.load(sums + V + one[None, :], mask=mask, other=0.0), axis=0)
            squares = tl.load(sums + V + 1 + one[None, :], mask=mask, other=0.0)
            norm_square += tl.sum(squares, axis=0)
    # The token's weight for itself is the power, as a sum of features would cancel digits.
    k_mask = (kk < K)[None, :]
    q = tl.load(q_ptr + b * stride_qb + h * stride_qh + kk[None, :], mask=k_mask, other=0.0)
    k = tl.load(k_ptr + b * stride_kb + g * stride_kh + kk[None, :], mask=k_mask, other=0.0)
    q, k = q.to(tl.float32), k.to(tl.float32)
    own = power(scale * sum_of_products(q, k, 1), DEGREE)
    value = tl.load(v_ptr + b * stride_vb + g * stride_vh + v, mask=v < V, other=0.0)
    acc = acc * state_scale + own * value.to(tl.float32)
    if NORMALIZE:
        den = den * state_scale + own
        floor = tl.full((1,), _FLOOR, tl.float32)
        size = den
        if DEGREE == 1:
            size = tl.abs(den)
        else:
            bound = power(scale * scale * sum_of_products(q, q, 1), DEGREE // 2)
            floor = tl.maximum(floor, rounding * bound * tl.sqrt(norm_square))
        acc /= tl.where(size >= floor, den, floor)
    out_off = (b * H + h) * V
    tl.store(out_ptr + out_off + v, acc.to(out_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def _rounded(kv, norm, v):
    """kv (BLOCK_F, BLOCK_V) from float32 to bfloat16 at random: state.py, `round_kv`."""
    mixed = norm.to(tl.uint32, bitcast=True)[:, None] * _BY_NORM
    mixed += v.to(tl.uint32)[None, :] * _BY_COLUMN
    noise = ((mixed ^ (mixed >> 15)) * _FINAL) >> 16
    bits = kv.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(is_finite, (bits + noise) & 0xFFFF0000, bits)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
