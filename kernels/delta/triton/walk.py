"""The state through the chunks of a sequence, (7) and (8), and its gradient back, (11) and (12).

Chunks follow each other, so what each step waits for counts, and not what it computes. Few columns
of values make a step short, and make programs for more multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.launch import Candidates, candidates, chip, config, launch
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.prepare import Prepared
from longhaul.kernels.delta.triton.shapes import Shapes

# The first fits every chip. In one stage ptxas 12.8 assembles wrong code of the walk for Hopper.
_WALK = candidates(config(4, 2, BLOCK_V=16), config(4, 3, BLOCK_V=16), sm_90=1, sm_100=1)
_WALK_BACK = candidates(config(4, 1, BLOCK_V=16), config(4, 3, BLOCK_V=16), sm_90=1, sm_100=1)
# Where a multiprocessor has no room for the tokens of two more steps: wide keys, and AMD's chips.
# The first must not run on Hopper, either.
_SMALL = candidates(config(4, 1, BLOCK_V=16), config(4, 2, BLOCK_V=16), sm_90=1, sm_100=1)
_MOST_BYTES = 256  # of a key, for the others


class Walked(NamedTuple):
    """What a walk leaves."""

    states: Tensor | None  # (chunks, H, K, V) before each chunk
    new: Tensor | None  # (B, T, H, V), the values that are written, less what was erased
    final: Tensor  # (S, H, K, V)


def walk(
    shapes: Shapes, chunks: Chunks, v: Tensor, prepared: Prepared, initial: Tensor | None, *,
    keeps: bool,
) -> Walked:  # fmt: skip
    """The state after every sequence; with `keeps` also those before chunks, and the new values."""
    B, T, H, V = v.shape
    K, S = shapes.K, len(chunks.sequences)
    erases = prepared.w is not None
    final = v.new_empty(S, H, K, V, dtype=torch.float32)
    states = shapes.scratch(v, chunks.num, H, K, V) if keeps else None
    new = shapes.scratch(v, B, T, H, V) if keeps and erases else None
    given = (v if prepared.u is None else prepared.u, prepared.w, prepared.k_end, prepared.total)
    launch(
        _delta_walk_kernel, _grid(S * H, V), _candidates(_WALK, shapes),
        *(final if x is None else x for x in (*given, initial, states, new)), final,
        chunks.table, chunks.sequences, T, H, K, V,
        HAS_INITIAL=initial is not None, KEEPS=keeps, ERASES=erases,
        WIDTH=shapes.padded_width, **shapes.meta,
    )  # fmt: skip
    return Walked(states, (new if erases else v) if keeps else None, final)


class WalkedBack(NamedTuple):
    """What a walk back leaves."""

    dstates: Tensor  # (chunks, H, K, V), of the state after each chunk
    dnew: Tensor  # (B, T, H, V)
    dinitial: Tensor  # (S, H, K, V)


def walk_back(
    shapes: Shapes, chunks: Chunks, v: Tensor, prepared: Prepared, dout: Tensor | None,
    dstate: Tensor | None,
) -> WalkedBack:  # fmt: skip
    """Gradients of the states, from those of the output and of the final states."""
    B, T, H, V = v.shape
    K, S = shapes.K, len(chunks.sequences)
    dinitial = v.new_empty(S, H, K, V, dtype=torch.float32)
    dstates = shapes.scratch(v, chunks.num, H, K, V)
    dnew = shapes.scratch(v, B, T, H, V)
    given = (prepared.k_end, prepared.q_start, prepared.p, prepared.w, prepared.total, dout, dstate)
    launch(
        _delta_walk_back_kernel, _grid(S * H, V), _candidates(_WALK_BACK, shapes),
        *(dinitial if x is None else x for x in given), dstates, dnew, dinitial,
        chunks.table, chunks.sequences, T, H, K, V,
        HAS_OUTPUT=dout is not None, HAS_FINAL=dstate is not None,
        ERASES=prepared.w is not None, WIDTH=shapes.padded_width, **shapes.meta,
    )  # fmt: skip
    return WalkedBack(dstates, dnew, dinitial)


def _candidates(usual: Candidates, shapes: Shapes) -> Candidates:
    bytes_of_key = shapes.padded_width * shapes.dtype.itemsize
    return usual if bytes_of_key <= _MOST_BYTES and not chip().startswith("gfx") else _SMALL


def _grid(heads: int, V: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    return lambda meta: (heads, triton.cdiv(V, meta["BLOCK_V"]))


@triton.jit
def _sequence(table_ptr, sequences_ptr, sequence):
    """Its first chunk and their number, its batch, and its first token and the one after it."""
    first = tl.load(sequences_ptr + 2 * sequence)
    count = tl.load(sequences_ptr + 2 * sequence + 1)
    _, batch, _, _, start, end = load_chunk(table_ptr, first)
    return first, count, batch, start, end


@triton.jit
def _decay(total_ptr, chunk, h, H, kk, K, CHANNELS: tl.constexpr):
    """Over a chunk: a column with CHANNELS, else one number."""
    if CHANNELS:
        return tl.load(total_ptr + (chunk * H + h) * K + kk, mask=kk < K, other=0.0)[:, None]
    else:  # noqa: RET505
        return tl.load(total_ptr + chunk * H + h)


@triton.jit
def _delta_walk_kernel(
    u_ptr, w_ptr, k_end_ptr, total_ptr, initial_ptr, states_ptr, new_ptr, final_ptr, table_ptr,
    sequences_ptr, T, H, K, V,
    HAS_INITIAL: tl.constexpr, KEEPS: tl.constexpr, ERASES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first, count, batch, start, end = _sequence(table_ptr, sequences_ptr, sequence)
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, WIDTH)
    vv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = kk[:, None] * V + vv[None, :]
    is_place = (kk < K)[:, None] & (vv < V)[None, :]
    given = (sequence * H + h) * K * V + place
    state = tl.zeros((WIDTH, BLOCK_V), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + given, mask=is_place, other=0.0).to(tl.float32)
    for number in range(0, count):
        chunk = first + number
        is_token = c < end - start
        row = (batch * T + start) * H + h
        decay = _decay(total_ptr, chunk, h, H, kk, K, CHANNELS)
        k_end = load_rows(k_end_ptr + row * K, c, is_token, H * K, kk, K)
        new = load_rows(u_ptr + row * V, c, is_token, H * V, vv, V)
        kept = state.to(DOT)
        if KEEPS:
            at = states_ptr + (chunk * H + h) * K * V + place
            tl.store(at, kept.to(states_ptr.dtype.element_ty), mask=is_place)
        if ERASES:
            w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K)
            new = new.to(tl.float32) - tl.dot(w, kept, input_precision=PRECISION)
            if KEEPS:
                at = new_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
                is_value = is_token[:, None] & (vv < V)[None, :]
                tl.store(at, new.to(new_ptr.dtype.element_ty), mask=is_value)
        state *= decay
        state += tl.dot(tl.trans(k_end), new.to(DOT), input_precision=PRECISION)
        start += BLOCK_C
    tl.store(final_ptr + given, state, mask=is_place)


@triton.jit
def _delta_walk_back_kernel(
    k_end_ptr, q_start_ptr, p_ptr, w_ptr, total_ptr, dout_ptr, dfinal_ptr, dstates_ptr, dnew_ptr,
    dinitial_ptr, table_ptr, sequences_ptr, T, H, K, V,
    HAS_OUTPUT: tl.constexpr, HAS_FINAL: tl.constexpr, ERASES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first, count, batch, start, end = _sequence(table_ptr, sequences_ptr, sequence)
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, WIDTH)
    vv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = kk[:, None] * V + vv[None, :]
    is_place = (kk < K)[:, None] & (vv < V)[None, :]
    given = (sequence * H + h) * K * V + place
    dstate = tl.zeros((WIDTH, BLOCK_V), tl.float32)
    if HAS_FINAL:
        dstate = tl.load(dfinal_ptr + given, mask=is_place, other=0.0).to(tl.float32)
    start += (count - 1) * BLOCK_C
    for number in range(0, count):
        chunk = first + count - 1 - number
        is_token = c < end - start
        row = (batch * T + start) * H + h
        decay = _decay(total_ptr, chunk, h, H, kk, K, CHANNELS)
        k_end = load_rows(k_end_ptr + row * K, c, is_token, H * K, kk, K)
        kept = dstate.to(DOT)
        at = dstates_ptr + (chunk * H + h) * K * V + place
        tl.store(at, kept.to(dstates_ptr.dtype.element_ty), mask=is_place)
        dnew = tl.dot(k_end, kept, input_precision=PRECISION)
        dstate *= decay
        if HAS_OUTPUT:
            dout = load_rows(dout_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
            p = load_rows(p_ptr + row * BLOCK_C, c, is_token, H * BLOCK_C, c, BLOCK_C)
            q_start = load_rows(q_start_ptr + row * K, c, is_token, H * K, kk, K)
            dnew += tl.dot(tl.trans(p), dout, input_precision=PRECISION)
            dstate += tl.dot(tl.trans(q_start), dout, input_precision=PRECISION)
        at = dnew_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
        is_value = is_token[:, None] & (vv < V)[None, :]
        tl.store(at, dnew.to(dnew_ptr.dtype.element_ty), mask=is_value)
        if ERASES:
            w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K)
            dstate -= tl.dot(tl.trans(w), dnew.to(DOT), input_precision=PRECISION)
        start -= BLOCK_C
    tl.store(dinitial_ptr + given, dstate, mask=is_place)
