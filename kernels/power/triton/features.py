"""Tables of tiles, and device functions that compute φ and its gradient tile by tile in registers.

README.md, section 3, defines the layout. A table has one row per tile of features, so that the same
loop works for every degree. Rows are padded to whole blocks with tiles beyond K of multiplicity 0.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import block_of, chip, is_interpreted
from longhaul.kernels.shapes import padded_width, state_features, tile_width

# The index of a tile beyond every key width: all its coordinates are masked.
_NO_TILE = 1 << 20


class Tiles(NamedTuple):
    """The tiles of features for one key width and degree."""

    table: Tensor  # (tiles, degree + 1) int32: I_1 ≤ … ≤ I_p, multiplicity
    tile: int  # width w of a tile; at degree 1 the width of a block of K
    at_once: int  # tiles that a kernel builds at a time
    num_blocks: int  # rows of `table` / at_once
    P: int


class Slots(NamedTuple):
    """The features that contain each tile of x, which is called a slot here."""

    table: Tensor  # (slots · per_slot, 2 degree + 1) int32: row, stride, (tile, stride)…, weight
    num_blocks: int  # per_slot / at_once


@cache  # for good: see chunking.py
def tiles_of(K: int, degree: int, device: torch.device, dtype: torch.dtype) -> Tiles:
    """The tiles for key width K. Degree 1 needs no table."""
    P = state_features(K, degree)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    if degree == 1:
        tile = min(64, max(16, triton.next_power_of_2(K)))
        return Tiles(empty, tile, 1, triton.cdiv(K, tile), P)
    tile = tile_width(degree)
    count = padded_width(K, degree) // tile
    tuples = list(combinations_with_replacement(range(count), degree))
    at_once = _tiles_at_once(count, degree, dtype)

    table = [(*tiles, _orderings(tiles)) for tiles in tuples]
    table += [(_NO_TILE,) * degree + (0,)] * (-len(table) % at_once)

    return Tiles(
        torch.tensor(table, dtype=torch.int32, device=device),
        tile,
        at_once,
        len(table) // at_once,
        P,
    )


@cache  # for good: see chunking.py
def slots_of(K: int, degree: int, device: torch.device, at_once: int, is_symmetric: bool) -> Slots:
    """For every tile of x, the features that contain it, as `_slot_gradient` reads them.

    A state that is a sum of φ(k) vᵀ is symmetric: swapping two coordinates in equal tiles does not
    change it, so one place of the tile in every tuple is enough. A state given by the caller may be
    asymmetric; then every place is listed, which is an eighth more at degree 2 and K = 64.
    """
    if degree == 1:
        return Slots(torch.empty(0, dtype=torch.int32, device=device), 0)
    tile = tile_width(degree)
    count = padded_width(K, degree) // tile
    table: list[tuple[int, ...]] = []
    for slot in range(count):
        rows = []
        for n, tiles in enumerate(combinations_with_replacement(range(count), degree)):
            places = [place for place in range(degree) if tiles[place] == slot]
            # In a symmetric state all places of the tile have equal gradients.
            kept = places[:1] if is_symmetric else places
            weight = _orderings(tiles) * len(places) // max(len(kept), 1)
            for place in kept:
                others = [(tiles[r], tile**r) for r in range(degree) if r != place]
                flat = [x for pair in others for x in pair]
                rows.append((n * tile**degree, tile**place, *flat, weight))
        rows += [(0, 0, *(_NO_TILE, 0) * (degree - 1), 0)] * (-len(rows) % at_once)
        table += rows
    per_slot = len(table) // count
    return Slots(torch.tensor(table, dtype=torch.int32, device=device), per_slot // at_once)


def in_pairs(K: int, V: int, degree: int, dtype: torch.dtype) -> bool:
    """Whether `state_gradient` adds up the gradients of all tiles of x at once.

    That takes all registers of a program in bfloat16 on chips whose products read both operands
    from shared memory; elsewhere it takes more. The interpreter stands in for those chips.
    """
    if degree != 2 or max(K, V) > 64:
        return False
    return is_interpreted() or (dtype == torch.bfloat16 and chip() in ("sm_90", "sm_100"))


def norm_columns(K: int) -> int:
    """Columns of the norm matrix of degree 2 that a kernel holds at a time.

    128 x 128 float32 fill AMD's shared memory. On NVIDIA's chips half of them would be held in
    registers, which are then too few.
    """
    whole = block_of(K)
    return 64 if whole > 64 and not chip().startswith("sm_") else whole


def _orderings(tiles: tuple[int, ...]) -> int:
    """Distinct orderings of a sorted tuple, eq. (7)."""
    return factorial(len(tiles)) // prod(factorial(tiles.count(one)) for one in set(tiles))


def _tiles_at_once(count: int, degree: int, dtype: torch.dtype) -> int:
    """Tiles that a kernel computes at a time, whose features share loads of values.

    They have 128 features where operands are bfloat16 and there is more than one tile, else 64:
    operands of float32 need twice the registers.
    """
    features = 128 if dtype == torch.bfloat16 and count > 1 else 64
    return features // int(tile_width(degree) ** degree)


@triton.jit
def carried_multiplicity(
    tiles_ptr, f, P, DEGREE: tl.constexpr, TILE: tl.constexpr, IS_REVERSE: tl.constexpr
):
    """What gradients of states with respect to features f are divided by while they are carried.

    It is the multiplicity, so that they are sums like states. States are carried as they are.
    """
    found = tl.full(f.shape, 1.0, tl.float32)
    if DEGREE > 1 and IS_REVERSE:
        at = f // TILE**DEGREE * (DEGREE + 1) + DEGREE
        found = tl.load(tiles_ptr + at, mask=f < P, other=1).to(tl.float32)
    return found


@triton.jit
def _load_tiles(
    x_ptr, t_off, t_mask, tiles, K,
    TILE: tl.constexpr, TOKENS_LAST: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Coordinates of R tiles of x: (BLOCK_T, R, TILE) in DTYPE, or (R, TILE, BLOCK_T)."""
    column = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    if TOKENS_LAST:
        off = column[:, :, None] + t_off[None, None, :]
        mask = (column < K)[:, :, None] & t_mask[None, None, :]
    else:
        off = column[None, :, :] + t_off[:, None, None]
        mask = (column < K)[None, :, :] & t_mask[:, None, None]
    return tl.load(x_ptr + off, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _outer(slow, fast, TOKENS_LAST: tl.constexpr):
    """All products of the features of two tile tuples; those of `fast` vary fastest."""
    if TOKENS_LAST:
        pairs = slow[:, :, None, :] * fast[:, None, :, :]
        pairs = tl.reshape(pairs, (slow.shape[0], slow.shape[1] * fast.shape[1], slow.shape[2]))
    else:
        pairs = slow[:, :, :, None] * fast[:, :, None, :]
        pairs = tl.reshape(pairs, (slow.shape[0], slow.shape[1], slow.shape[2] * fast.shape[2]))
    return pairs


@triton.jit
def features(
    x_ptr, t_off, t_mask, table_ptr, block, K,
    DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    TOKENS_LAST: tl.constexpr, IS_READ: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of φ(x), eq. (6): (BLOCK_T, F), or (F, BLOCK_T), of dtype DOT, float32 at degree 4.

    IS_READ multiplies by the multiplicities m of eq. (7). The shape is that of the operand of the
    next matrix product, so that the compiler loads the tiles directly in its layout.
    """
    # Below degree 4 a feature is one product, times 1 or 2: rounded once in any dtype.
    DTYPE: tl.constexpr = tl.float32 if DEGREE == 4 else DOT
    if DEGREE == 1:
        column = block * TILE + tl.arange(0, TILE)
        if TOKENS_LAST:
            off = column[:, None] + t_off[None, :]
            mask = (column < K)[:, None] & t_mask[None, :]
        else:
            off = column[None, :] + t_off[:, None]
            mask = (column < K)[None, :] & t_mask[:, None]
        phi = tl.load(x_ptr + off, mask=mask, other=0.0).to(DTYPE)
    else:
        row_ptr = table_ptr + (block * AT_ONCE + tl.arange(0, AT_ONCE)) * (DEGREE + 1)
        one, two = tl.load(row_ptr), tl.load(row_ptr + 1)
        fast = _load_tiles(x_ptr, t_off, t_mask, one, K, TILE, TOKENS_LAST, DTYPE)
        slow = _load_tiles(x_ptr, t_off, t_mask, two, K, TILE, TOKENS_LAST, DTYPE)
        if DEGREE == 4:
            fast = _outer(slow, fast, TOKENS_LAST)
            three, four = tl.load(row_ptr + 2), tl.load(row_ptr + 3)
            third = _load_tiles(x_ptr, t_off, t_mask, three, K, TILE, TOKENS_LAST, DTYPE)
            fourth = _load_tiles(x_ptr, t_off, t_mask, four, K, TILE, TOKENS_LAST, DTYPE)
            slow = _outer(fourth, third, TOKENS_LAST)
        if IS_READ:
            multiplicity = tl.load(row_ptr + DEGREE).to(DTYPE)
            if TOKENS_LAST:
                fast *= multiplicity[:, None, None]
            else:
                fast *= multiplicity[None, :, None]
        phi = _outer(slow, fast, TOKENS_LAST)
        if TOKENS_LAST:
            phi = tl.reshape(phi, (phi.shape[0] * phi.shape[1], phi.shape[2]))
        else:
            phi = tl.reshape(phi, (phi.shape[0], phi.shape[1] * phi.shape[2]))
    return phi


@triton.jit
def matrix_offsets(i, j, K, TILE: tl.constexpr):
    """Index of x_i x_j among the features of degree 2, and whether it exists.

    With the norm as a symmetric matrix N, Σ_f m_f φ(x)_f n_f = xᵀ N x is a single matrix product. A
    sum over features would instead need a reduction across the lanes of a warp for every tile.
    """
    count = tl.cdiv(K, TILE)
    first, last = tl.minimum(i, j) // TILE, tl.maximum(i, j) // TILE
    tile = first * count - first * (first - 1) // 2 + last - first
    # The coordinate in the first tile varies fastest; if both tiles are the same, it is i.
    is_swapped = i // TILE > j // TILE
    fast = tl.where(is_swapped, j, i) % TILE
    slow = tl.where(is_swapped, i, j) % TILE
    return (tile * TILE + slow) * TILE + fast, last < count


@triton.jit
def load_norm_columns(norm_ptr, i, j, K, TILE: tl.constexpr):
    """Rows i and columns j of N. Only a norm given by the caller is asymmetric, within a tile."""
    off, is_there = matrix_offsets(i, j, K, TILE)
    return tl.load(norm_ptr + off, mask=is_there, other=0.0)


@triton.jit
def into_columns(part, index, BLOCK_K: tl.constexpr):
    """Place part (BLOCK_T, W) in zeros (BLOCK_T, BLOCK_K), from column index · W on."""
    WIDTH: tl.constexpr = part.shape[1]
    if BLOCK_K == WIDTH:
        return part
    else:  # noqa: RET505
        is_place = tl.arange(0, BLOCK_K // WIDTH) == index
        placed = tl.where(is_place[None, :, None], part[:, None, :], 0.0)
        return tl.reshape(placed, (part.shape[0], BLOCK_K))


@triton.jit
def norm_gradient(
    x, norm_ptr, K,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, NORM_COLUMNS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of xᵀ N x, which is x (N + Nᵀ)."""
    i = tl.arange(0, BLOCK_K)
    if NORM_COLUMNS == BLOCK_K:
        matrix = load_norm_columns(norm_ptr, i[:, None], i[None, :], K, TILE)
        return times_matrix(x, matrix + tl.trans(matrix), DOT, PRECISION)
    else:  # noqa: RET505
        gradient = tl.zeros((x.shape[0], BLOCK_K), tl.float32)
        for index in tl.static_range(BLOCK_K // NORM_COLUMNS):
            j = index * NORM_COLUMNS + tl.arange(0, NORM_COLUMNS)
            matrix = load_norm_columns(norm_ptr, i[:, None], j[None, :], K, TILE)
            matrix += load_norm_columns(norm_ptr, j[None, :], i[:, None], K, TILE)
            gradient += into_columns(times_matrix(x, matrix, DOT, PRECISION), index, BLOCK_K)
        return gradient


@triton.jit
def times_matrix(x, matrix, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x @ matrix to float32 accuracy, for x that DOT represents exactly."""
    # A single TF32 product would drop half of the matrix's bits.
    EXACT: tl.constexpr = "tf32x3" if PRECISION == "tf32" else PRECISION
    high = matrix.to(DOT)
    product = tl.dot(x, high, input_precision=EXACT)
    if tl.float32 != DOT:
        low = (matrix - high.to(tl.float32)).to(DOT)
        product = tl.dot(x, low, product, input_precision=EXACT)
    return product


@triton.jit
def state_gradient(
    y, c, x, x_ptr, t_off, t_mask, kv_ptr, norm_ptr, slots_ptr, K, V,
    NUM_SLOTS: tl.constexpr, SLOT_BLOCKS: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_NORM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of Σ_f m_f φ(x_t)_f (S_f y_t + n_f c_t) for x, eq. (18): (BLOCK_T, BLOCK_K).

    At degree 2 the term with n is computed by `norm_gradient` instead.
    """
    if IN_PAIRS:
        return _pairs_gradient(
            y, x, x_ptr, t_off, t_mask, kv_ptr, K, V,
            NUM_SLOTS, TILE, BLOCK_K, BLOCK_V, DOT, PRECISION,
        )  # fmt: skip
    else:  # noqa: RET505
        total = tl.zeros((y.shape[0], BLOCK_K), tl.float32)
        for slot in range(NUM_SLOTS):
            part = _slot_gradient(
                y, c, x_ptr, t_off, t_mask, kv_ptr, norm_ptr, slots_ptr, slot, K, V,
                DEGREE, TILE, AT_ONCE, SLOT_BLOCKS, BLOCK_V, HAS_NORM, DOT, PRECISION,
            )  # fmt: skip
            total += into_columns(part, slot, BLOCK_K)
        return total


@triton.jit
def _load_pair(
    kv_ptr, first, last, V, mask, other,
    NUM_SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The features x_a x_b of two tiles, (TILE², BLOCK_V); a, of the first tile, varies fastest."""
    v = tl.arange(0, BLOCK_V)
    pair = first * NUM_SLOTS - first * (first - 1) // 2 + last - first
    row = pair * TILE * TILE + tl.arange(0, TILE * TILE)
    return tl.load(
        kv_ptr + row[:, None] * V + v[None, :], mask=mask & (v < V)[None, :], other=other
    )


@triton.jit
def _pairs_gradient(
    y, x, x_ptr, t_off, t_mask, kv_ptr, K, V,
    NUM_SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`state_gradient` at degree 2, which reads every tile of the state once.

    With D = S_f·y of the features x_a x_b of two tiles, the gradient of x_a is Σ_b D_ab x_b, whose
    terms one thread holds, and that of x_b is Σ_a D_ab x_a, whose terms several threads hold. The
    inner loop is unrolled, so that the first sum goes to registers that are known, and the second
    waits for its end.
    """
    BLOCK_T: tl.constexpr = y.shape[0]
    slots = tl.arange(0, BLOCK_K // TILE)[None, :, None]
    coordinate = tl.arange(0, TILE)
    t_off, t_mask = t_off[:, None, None], t_mask[:, None, None]
    total = tl.zeros((BLOCK_T, BLOCK_K // TILE, TILE), tl.float32)
    # A product with the identity, which is exact, places x where the other products are: a, b and
    # the slot are then known registers of a thread, and choosing one of them takes no instruction.
    identity = tl.arange(0, BLOCK_K)[:, None] == tl.arange(0, BLOCK_K)[None, :]
    all_x = tl.dot(x, identity.to(DOT), input_precision=PRECISION)
    all_x = tl.reshape(all_x, (BLOCK_T, BLOCK_K // TILE, TILE))
    following = _load_pair(kv_ptr, 0, 0, V, True, 0.0, NUM_SLOTS, TILE, BLOCK_V)
    for last in range(NUM_SLOTS):
        b = (last * TILE + coordinate)[None, :, None]
        x_last = tl.load(x_ptr + t_off + b, mask=t_mask & (b < K), other=0.0).to(tl.float32)
        # Here, so that it is brought into its layout once for all pairs.
        x_last = tl.broadcast_to(x_last, (BLOCK_T, TILE, TILE))
        terms = tl.zeros((BLOCK_T, TILE, TILE), tl.float32)
        for first in tl.static_range(NUM_SLOTS):
            kv = following.to(DOT)
            is_pair, is_end = first <= last, first == last
            # Loaded while this pair's product is computed.
            following = _load_pair(
                kv_ptr, tl.where(is_end, 0, first + 1), tl.where(is_end, last + 1, last), V,
                is_pair & (~is_end | (last + 1 < NUM_SLOTS)), following, NUM_SLOTS, TILE, BLOCK_V,
            )  # fmt: skip
            if is_pair:
                product = tl.dot(y, tl.trans(kv), input_precision=PRECISION)
                product = tl.reshape(product, (BLOCK_T, TILE, TILE))  # t, b, a
                half = tl.where(is_end, 0.5, 1.0)  # multiplicity 1, others have 2
                part = half * tl.sum(product * x_last, axis=1)
                total = tl.where(slots == first, total + part[:, None, :], total)
                # Adding −0 changes nothing, which a compiler knows. It would keep additions of 0.
                x_first = tl.sum(tl.where(slots == first, all_x, -0.0), axis=1)
                terms += product * (half * x_first)[:, None, :]
        part = tl.sum(terms, axis=2)
        total = tl.where(slots == last, total + part[:, None, :], total)
    return tl.reshape(2 * total, (BLOCK_T, BLOCK_K))


@triton.jit
def _slot_gradient(
    y, c, x_ptr, t_off, t_mask, kv_ptr, norm_ptr, slots_ptr, slot, K, V,
    DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, SLOT_BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_NORM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of `state_gradient` for x in one tile.

    x_a multiplies every product of p − 1 coordinates. A row of the slot table has the first row of
    the state for one tuple of tiles, the stride of a in it, tile and stride of every other
    coordinate, and a weight. Rows of the state are read more than once (1.8 times at degree 2,
    K = 64); reading them once takes the registers that `in_pairs` asks for.
    """
    a = tl.arange(0, TILE)
    v = tl.arange(0, BLOCK_V)
    total = tl.zeros((y.shape[0], TILE), tl.float32)
    if DEGREE == 1:
        column = slot * TILE + a
        columns = tl.load(
            kv_ptr + column[:, None] * V + v[None, :],
            mask=(column < K)[:, None] & (v < V)[None, :],
            other=0.0,
        ).to(DOT)
        total = tl.dot(y, tl.trans(columns), total, input_precision=PRECISION)
        if HAS_NORM:
            total += c[:, None] * tl.load(norm_ptr + column, mask=column < K, other=0.0)[None, :]
    for n in range(SLOT_BLOCKS):
        entry = (slot * SLOT_BLOCKS + n) * AT_ONCE + tl.arange(0, AT_ONCE)
        row_ptr = slots_ptr + entry * (2 * DEGREE + 1)
        rows = tl.load(row_ptr)[:, None] + a[None, :] * tl.load(row_ptr + 3)[:, None]
        z = _load_tiles(x_ptr, t_off, t_mask, tl.load(row_ptr + 2), K, TILE, False, tl.float32)
        if DEGREE == 4:
            two, three = tl.load(row_ptr + 4), tl.load(row_ptr + 6)
            second = _load_tiles(x_ptr, t_off, t_mask, two, K, TILE, False, tl.float32)
            third = _load_tiles(x_ptr, t_off, t_mask, three, K, TILE, False, tl.float32)
            z = _outer(_outer(third, second, False), z, False)
            rows = rows[:, None, :] + (a[None, :] * tl.load(row_ptr + 5)[:, None])[:, :, None]
            rows = (
                rows[:, None, :, :] + (a[None, :] * tl.load(row_ptr + 7)[:, None])[:, :, None, None]
            )
            rows = tl.reshape(rows, (AT_ONCE, TILE * TILE * TILE))
        z *= tl.load(row_ptr + 2 * DEGREE).to(tl.float32)[None, :, None]
        rows = rows[:, :, None] + (a[None, :] * tl.load(row_ptr + 1)[:, None])[:, None, :]
        rows = tl.reshape(rows, (rows.shape[0] * rows.shape[1] * rows.shape[2],))
        kv_off = rows[:, None] * V + v[None, :]
        kv = tl.load(kv_ptr + kv_off, mask=(v < V)[None, :], other=0.0).to(DOT)  # (F, BLOCK_V)
        dphi = tl.dot(y, tl.trans(kv), input_precision=PRECISION)  # (BLOCK_T, F)
        if HAS_NORM and DEGREE > 2:
            dphi += c[:, None] * tl.load(norm_ptr + rows)[None, :]
        z = tl.reshape(z, (z.shape[0], z.shape[1] * z.shape[2]))
        dphi = tl.reshape(dphi, (z.shape[0], z.shape[1], TILE))
        total += tl.sum(dphi * z[:, :, None], axis=1)
    return total
