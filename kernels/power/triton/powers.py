"""Integer powers, sums of products, and rounded weights: device functions that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(x, EXPONENT: tl.constexpr):
    """x^EXPONENT by repeated multiplication."""
    if EXPONENT == 1:
        return x
    elif EXPONENT % 2 == 1:  # noqa: RET505
        return x * power(x, EXPONENT - 1)
    else:
        half = power(x, EXPONENT // 2)
        return half * half


@triton.jit
def sum_of_products(a, b, AXIS: tl.constexpr):
    """Σ a b, whose bits are the same in all lanes that hold it.

    Compilers fuse the product in tl.sum(a * b) with the first addition over lanes, as fma(a, b, the
    other lane's product). That rounds one of two products, in each lane another. Lanes then differ
    in the last bit, and where they store to one address, either may win.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis=AXIS)


@triton.jit
def rounded_weights(w, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Weights whose sum and whose product with values see the same bits in TF32.

    Matrix units cut the bits that TF32 has no room for. The product would be too small by up to
    2^-10 of itself, the denominator would not, and a row of one key would not read its value.
    """
    if PRECISION == "tf32" and DOT == tl.float32:  # noqa: SIM300
        bits = w.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        # The bits of a NaN could overflow to those of a number.
        w = tl.where(w == w, nearest, w)
    return w
