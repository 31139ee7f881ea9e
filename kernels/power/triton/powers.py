"""Integer powers."""

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
