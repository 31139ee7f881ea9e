"""Matrix products of warps and of groups of four warps, and where their operands lie.

Source: PTX ISA, "matrix fragments for mma.m16n8k16", "register fragments and shared memory layouts
for wgmma", "matrix descriptor". Products are of float32, in which those of 16-bit and TF32 numbers
are exact; their sums are rounded in another order than on a chip.
"""

from __future__ import annotations

import numpy as np
from arithmetic import Array, f4, i8, u2, u4, u8
from memories import FaultError

# Bytes of a row and bits of the swizzle, by the layout in a descriptor.
_SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}


def _floats(bits: Array, kind: str) -> Array:
    """Contiguous words as float32; two 16-bit numbers in each word become neighbours."""
    if kind == "tf32":
        return (bits.view(u4) & 0xFFFFE000).view(f4)
    halves = bits.view(u2)
    if kind == "f16":
        return halves.view(np.float16).astype(f4)
    return (halves.astype(u4) << 16).view(f4)


def _stacked(registers: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
    return np.stack([np.broadcast_to(x, shape) for x in registers])


def left_of_registers(kind: str, registers: tuple[Array, ...], shape: tuple[int, int]) -> Array:
    """The left operand of each warp, (p, warps, 16, k), from four registers of each lane."""
    p, lanes = shape
    found = _floats(_stacked(registers, shape), kind)
    per = found.shape[-1] // lanes
    # (half of k, half of rows, p, warps, row, column, number)
    found = found.reshape(2, 2, p, lanes // 32, 8, 4, per)
    return found.transpose(2, 3, 1, 4, 0, 5, 6).reshape(p, lanes // 32, 16, 8 * per)


def of_warps(kind: str, a: tuple[Array, ...], b: tuple[Array, ...], lanes: int) -> Array:
    """mma.sync m16n8: sums (4, p, l) without what they are added to."""
    p = max(len(x) for x in (*a, *b))
    left = left_of_registers(kind, a, (p, lanes))
    right = _floats(_stacked(b, (p, lanes)), kind)
    per = right.shape[-1] // lanes
    right = right.reshape(2, p, lanes // 32, 8, 4 * per)  # (half of k, p, warps, column, k)
    right = right.transpose(1, 2, 0, 4, 3).reshape(p, lanes // 32, 8 * per, 8)
    total = (left @ right).reshape(p, lanes // 32, 2, 8, 4, 2)
    return total.transpose(2, 5, 0, 1, 3, 4).reshape(4, p, lanes)


def of_groups(left: Array, right: Array) -> Array:
    """wgmma: sums (n / 2, p, l) of a left operand of warps or groups and a right one of groups."""
    p, groups, _, n = right.shape
    total = left.reshape(p, groups, 64, -1) @ right
    total = total.reshape(p, groups, 4, 2, 8, n // 8, 4, 2)
    return total.transpose(5, 3, 7, 0, 1, 2, 4, 6).reshape(n // 2, p, 128 * groups)


def chunks_of(descriptors: Array, kind: str, rows: int, is_turned: bool) -> Array:
    """Addresses (p, g, n) of the chunks of 16 bytes that hold an operand of wgmma.

    A row of the operand is a row of the left or a column of the right matrix; k is 16 numbers of 2
    bytes or 8 of 4. An operand that is turned has neighbouring rows at neighbouring addresses.
    """
    d = descriptors[..., None].astype(u8)
    start, leading, stride = (((d >> shift) & 0x3FFF).astype(i8) << 4 for shift in (0, 16, 32))
    layout = int(d.flat[0]) >> 62
    if layout not in _SWIZZLES or ((d >> 62) != layout).any() or ((d >> 49) & 7).any():
        raise FaultError("a matrix descriptor that is not known to the emulator")
    width, mask = _SWIZZLES[layout]
    if is_turned:
        if kind == "tf32":
            raise FaultError("a turned operand of TF32, which wgmma does not have")
        k, row = np.indices((16, rows // 8)).reshape(2, 1, 1, -1)
        row = 8 * row
        per = width // 2
        address = start + row // per * leading + k // 8 * stride + k % 8 * width + row % per * 2
    else:
        row, half = np.indices((rows, 2)).reshape(2, 1, 1, -1)
        address = start + row // 8 * stride + row % 8 * width + half * 16
    return address ^ (((address >> 7) & mask) << 4)


def matrix_of_chunks(found: Array, kind: str, rows: int, is_turned: bool) -> Array:
    """The chunks' bytes (p, g, n, 16) as a matrix (p, g, k, rows)."""
    p, g = found.shape[:2]
    numbers = _floats(np.ascontiguousarray(found).view(u4), kind).reshape(p, g, -1)
    if is_turned:
        return numbers.reshape(p, g, -1, rows)
    return numbers.reshape(p, g, rows, -1).swapaxes(2, 3)


def matrices_of_rows(rows: Array, count: int, is_turned: bool) -> list[Array]:
    """ldmatrix: rows (p, l, 2) of 16 bytes as one register (p, l) for each matrix."""
    p, lanes, _ = rows.shape
    found = rows.view(u2).reshape(p, lanes // 32, 4, 8, 8)
    if is_turned:
        found = np.ascontiguousarray(found.swapaxes(3, 4))
    words = found.view(u4)  # (p, warps, 4, 8, 4)
    return [np.ascontiguousarray(words[:, :, i]).reshape(p, lanes) for i in range(count)]


def rows_of_matrices(registers: list[Array], is_turned: bool) -> Array:
    """stmatrix: the reverse, with zeros for matrices that are not given."""
    p, lanes = registers[0].shape
    words = np.zeros((p, lanes // 32, 4, 8, 4), u4)
    for i, x in enumerate(registers):
        words[:, :, i] = x.reshape(p, lanes // 32, 8, 4)
    found = words.view(u2)
    if is_turned:
        found = np.ascontiguousarray(found.swapaxes(3, 4))
    return found.reshape(p, lanes, 8).view(u8)
