"""Device functions on rows of tokens: loading them, weighing them, adding their products up."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(x_ptr, t, t_mask, stride_t, column, width):
    """Rows t of x, (tokens, columns); zeros where t_mask is false, and from column `width` on.

    None as t_mask promises that all rows are there, and None as width that all columns are: a mask
    that is always true would cost registers.
    """
    at = x_ptr + t[:, None] * stride_t + column[None, :]
    if t_mask is None and width is None:
        return tl.load(at)
    elif t_mask is None:  # noqa: RET505
        return tl.load(at, mask=(column < width)[None, :], other=0.0)
    elif width is None:
        return tl.load(at, mask=t_mask[:, None], other=0.0)
    else:
        return tl.load(at, mask=t_mask[:, None] & (column < width)[None, :], other=0.0)


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
