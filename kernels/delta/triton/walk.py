"""The state through the chunks of a sequence, (7) and (8), and its gradient back, (11) and (12)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.decays import from_start, load_gates, over_chunk, to_end
from longhaul.kernels.delta.triton.prepare import Prepared
from longhaul.kernels.delta.triton.shapes import Shapes, blocks_of_values


class Walked(NamedTuple):
    """What a walk leaves."""

    states: Tensor | None  # (chunks, H, K, V) before each chunk
    new: Tensor | None  # (B, T, H, V), the values that are written, less what was erased
    final: Tensor  # (S, H, K, V)


def walk(
    shapes: Shapes, chunks: Chunks, k: Tensor, v: Tensor, log_g: Tensor, prepared: Prepared,
    initial: Tensor | None, *, keeps: bool,
) -> Walked:  # fmt: skip
    """The state after every sequence; with `keeps` also those before chunks, and the new values."""
    B, T, H, V = v.shape
    K, S = shapes.K, len(chunks.sequences)
    u, w = (v if x is None else x for x in (prepared.u, prepared.w))
    final = k.new_empty(S, H, K, V, dtype=torch.float32)
    states = final.new_empty(chunks.num, H, K, V) if keeps else final
    new = shapes.scratch(k, B, T, H, V) if keeps else final
    _delta_walk_kernel[(S * H, blocks_of_values(shapes, V))](
        k, u, w, log_g, final if initial is None else initial, states, new, final,
        chunks.table, chunks.sequences, T, H, shapes.G, K, V,
        HAS_INITIAL=initial is not None, KEEPS=keeps, ERASES=prepared.w is not None,
        **shapes.meta,
    )  # fmt: skip
    return Walked(states, new, final) if keeps else Walked(None, None, final)


class WalkedBack(NamedTuple):
    """What a walk back leaves."""

    dstates: Tensor  # (chunks, H, K, V), of the state after each chunk
    dnew: Tensor  # (B, T, H, V)
    dinitial: Tensor  # (S, H, K, V)


def walk_back(
    shapes: Shapes, chunks: Chunks, q: Tensor | None, k: Tensor, log_g: Tensor, prepared: Prepared,
    dout: Tensor | None, dstate: Tensor | None, like_values: Tensor, scale: float,
) -> WalkedBack:  # fmt: skip
    """Gradients of the states, from those of the output and of the final states."""
    B, T, H, V = like_values.shape
    K, S = shapes.K, len(chunks.sequences)
    dinitial = k.new_empty(S, H, K, V, dtype=torch.float32)
    dstates = dinitial.new_empty(chunks.num, H, K, V)
    dnew = shapes.scratch(k, B, T, H, V)
    given = (k if x is None else x for x in (q, prepared.p, prepared.w, dout))
    _delta_walk_back_kernel[(S * H, blocks_of_values(shapes, V))](
        k, *given, log_g, dinitial if dstate is None else dstate, dstates, dnew, dinitial,
        chunks.table, chunks.sequences, T, H, shapes.G, K, V, scale,
        HAS_OUTPUT=dout is not None, HAS_FINAL=dstate is not None,
        ERASES=prepared.w is not None, **shapes.meta,
    )  # fmt: skip
    return WalkedBack(dstates, dnew, dinitial)


@triton.jit
def _delta_walk_kernel(
    k_ptr, u_ptr, w_ptr, g_ptr, initial_ptr, states_ptr, new_ptr, final_ptr, table_ptr,
    sequences_ptr, T, H, G, K, V,
    HAS_INITIAL: tl.constexpr, KEEPS: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first = tl.load(sequences_ptr + 2 * sequence)
    count = tl.load(sequences_ptr + 2 * sequence + 1)
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    vv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = kk[:, None] * V + vv[None, :]
    is_place = (kk < K)[:, None] & (vv < V)[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_INITIAL:
        initial_ptr += (sequence * H + h) * K * V
        state = tl.load(initial_ptr + place, mask=is_place, other=0.0).to(tl.float32)
    for number in range(0, count):
        chunk = first + number
        _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
        is_token = c < end - start
        row = (batch * T + start) * H + h
        key = ((batch * T + start) * G + h // (H // G)) * K
        g_width = K if CHANNELS else 1
        gate_ptr = g_ptr + (batch * T * H + h) * g_width
        g, g_after = load_gates(gate_ptr, start, end, H * g_width, c, kk, K, CHANNELS, BLOCK_C)
        new = load_rows(u_ptr + row * V, c, is_token, H * V, vv, V)
        if ERASES:
            w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K).to(DOT)
            held = tl.dot(w, state.to(DOT), input_precision=PRECISION)
            new = new.to(tl.float32) - held
        new = new.to(DOT)
        if KEEPS:
            tl.store(states_ptr + (chunk * H + h) * K * V + place, state, mask=is_place)
            at = new_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
            tl.store(
                at, new.to(new_ptr.dtype.element_ty), mask=is_token[:, None] & (vv < V)[None, :]
            )
        k = load_rows(k_ptr + key, c, is_token, G * K, kk, K)
        k_end = (k.to(tl.float32) * to_end(g_after, CHANNELS)).to(DOT)
        state = over_chunk(g, CHANNELS) * state
        state += tl.dot(tl.trans(k_end), new, input_precision=PRECISION)
    tl.store(final_ptr + (sequence * H + h) * K * V + place, state, mask=is_place)


@triton.jit
def _delta_walk_back_kernel(
    k_ptr, q_ptr, p_ptr, w_ptr, dout_ptr, g_ptr, dfinal_ptr, dstates_ptr, dnew_ptr, dinitial_ptr,
    table_ptr, sequences_ptr, T, H, G, K, V, scale,
    HAS_OUTPUT: tl.constexpr, HAS_FINAL: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first = tl.load(sequences_ptr + 2 * sequence)
    count = tl.load(sequences_ptr + 2 * sequence + 1)
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    vv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = kk[:, None] * V + vv[None, :]
    is_place = (kk < K)[:, None] & (vv < V)[None, :]
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_FINAL:
        dfinal_ptr += (sequence * H + h) * K * V
        dstate = tl.load(dfinal_ptr + place, mask=is_place, other=0.0).to(tl.float32)
    for number in range(0, count):
        chunk = first + count - 1 - number
        _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
        is_token = c < end - start
        row = (batch * T + start) * H + h
        key = ((batch * T + start) * G + h // (H // G)) * K
        g_width = K if CHANNELS else 1
        gate_ptr = g_ptr + (batch * T * H + h) * g_width
        g, g_after = load_gates(gate_ptr, start, end, H * g_width, c, kk, K, CHANNELS, BLOCK_C)
        tl.store(dstates_ptr + (chunk * H + h) * K * V + place, dstate, mask=is_place)
        k = load_rows(k_ptr + key, c, is_token, G * K, kk, K)
        k_end = (k.to(tl.float32) * to_end(g_after, CHANNELS)).to(DOT)
        dnew = tl.dot(k_end, dstate.to(DOT), input_precision=PRECISION)
        dstate = over_chunk(g, CHANNELS) * dstate
        if HAS_OUTPUT:
            dout = load_rows(dout_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            dout = (scale * dout).to(DOT)
            p = load_rows(p_ptr + row * BLOCK_C, c, is_token, H * BLOCK_C, c, BLOCK_C).to(DOT)
            dnew += tl.dot(tl.trans(p), dout, input_precision=PRECISION)
            q = load_rows(q_ptr + key, c, is_token, G * K, kk, K)
            q_start = (q.to(tl.float32) * from_start(g, CHANNELS)).to(DOT)
            dstate += tl.dot(tl.trans(q_start), dout, input_precision=PRECISION)
        dnew = dnew.to(DOT)
        at = dnew_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
        tl.store(at, dnew.to(dnew_ptr.dtype.element_ty), mask=is_token[:, None] & (vv < V)[None, :])
        if ERASES:
            w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K).to(DOT)
            dstate -= tl.dot(tl.trans(w), dnew, input_precision=PRECISION)
    tl.store(dinitial_ptr + (sequence * H + h) * K * V + place, dstate, mask=is_place)
