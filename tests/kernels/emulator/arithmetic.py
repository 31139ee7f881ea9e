"""What PTX computes and numpy has no name for. Translated kernels see all names of this file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

u1, u2, u4, u8 = (np.dtype(f"u{size}") for size in (1, 2, 4, 8))
i1, i2, i4, i8 = (np.dtype(f"i{size}") for size in (1, 2, 4, 8))
f2, f4, f8 = (np.dtype(f"f{size}") for size in (2, 4, 8))

# Results of a wgmma that was not waited for. Whatever reads them becomes NaN.
IN_FLIGHT = np.full((1, 1), np.nan, f4)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Float32 a b + c, rounded once (almost always: the sum is first rounded to float64)."""
    return (a.astype(f8) * b + c).astype(f4)


def from_bf16(x: Array) -> Array:
    found: Array = (x.astype(u4) << 16).view(f4)
    return found


def to_bf16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, to even if two are as near."""
    bits = x.view(u4)
    rounded: Array = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(u2)


def from_f16(x: Array) -> Array:
    return x.view(f2).astype(f4)


def to_f16(x: Array) -> Array:
    return x.astype(f2).view(u2)


def from_bf16_pair(x: Array) -> Array:
    """Both halves of 32 bits (p, l) as float32 (2, p, l)."""
    return np.stack([(x << 16).view(f4), (x & 0xFFFF0000).view(f4)])


def to_bf16_pair(x: Array) -> Array:
    return joined((to_bf16(x[0]), to_bf16(x[1])), u4)


def from_f16_pair(x: Array) -> Array:
    return np.stack([from_f16(x.astype(u2)), from_f16((x >> 16).astype(u2))])


def to_f16_pair(x: Array) -> Array:
    return joined((to_f16(x[0]), to_f16(x[1])), u4)


def to_tf32(x: Array) -> Array:
    """Round float32 to ten bits, away from zero if two are as near (cvt.rna)."""
    return ((x.view(u4) + 0x1000) & 0xFFFFE000).view(f4)


def joined(pieces: tuple[Array, ...], kind: np.dtype[Any]) -> Array:
    """Pieces side by side in one number, the first in the lowest bits."""
    bits = 8 * pieces[0].itemsize
    whole = pieces[0].astype(f"u{kind.itemsize}")
    for i, piece in enumerate(pieces[1:], start=1):
        whole = whole | (piece.astype(whole.dtype) << (bits * i))
    return whole.view(kind)


def shifted_left(x: Array, by: Array) -> Array:
    bits = 8 * x.itemsize
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), 0).astype(x.dtype)


def shifted_right(x: Array, by: Array) -> Array:
    bits = 8 * x.itemsize
    moved = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return moved if x.dtype.kind == "i" else np.where(by < bits, moved, 0).astype(x.dtype)


def upper_product(x: Array, y: Array) -> Array:
    """The upper half of the bits of a product."""
    if x.itemsize == 4:
        double = f"{x.dtype.kind}8"
        whole: Array = x.astype(double) * y.astype(double)
        return (whole >> 32).astype(x.dtype)
    a, b = x.view(u8), y.view(u8)
    low_a, high_a, low_b, high_b = a & 0xFFFFFFFF, a >> 32, b & 0xFFFFFFFF, b >> 32
    middle: Array = high_a * low_b + ((low_a * low_b) >> 32)
    upper: Array = (
        high_a * high_b + (middle >> 32) + ((low_a * high_b + (middle & 0xFFFFFFFF)) >> 32)
    )
    if x.dtype.kind == "i":
        upper = upper - np.where(x < 0, b, u8.type(0)) - np.where(y < 0, a, u8.type(0))
    return upper.view(x.dtype)


def div(x: Array, y: Array) -> Array:
    """Integer quotient, towards zero. Division by zero gives all ones, as on the chips."""
    safe = np.where(y == 0, 1, y).astype(y.dtype)
    quotient: Array = np.abs(x) // np.abs(safe)
    quotient = np.where((x < 0) != (safe < 0), -quotient, quotient)
    return np.where(y == 0, np.array(-1).astype(x.dtype), quotient).astype(x.dtype)


def rem(x: Array, y: Array) -> Array:
    rest: Array = x - div(x, y) * y
    return rest.astype(x.dtype)


def permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt in its default mode: byte i of the result is that which digit i of selector names."""
    both = a.astype(u8) | (b.astype(u8) << 32)
    whole = np.zeros((1, 1), u4)
    for i in range(4):
        digit = (selector >> (4 * i)) & 0xF
        byte = ((both >> ((digit & 7).astype(u8) * 8)) & 0xFF).astype(u4)
        sign = np.where(byte & 0x80, 0xFF, 0).astype(u4)
        whole = whole | (np.where(digit & 8, sign, byte).astype(u4) << (8 * i))
    return whole
