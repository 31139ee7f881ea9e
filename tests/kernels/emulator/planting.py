"""Run small kernels in the emulator, right ones and such with a planted fault.

    python tests/kernels/emulator/planting.py [FILE]

prints what became of each as JSON: "right", "wrong", or the fault's message. Where a file is given,
what interpreter and emulator should agree on is saved there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import small_kernels
import torch
from launching import emulating
from memories import FaultError

from longhaul.kernels.common.triton.launch import configuration


def without(text: str) -> Callable[[str], str]:
    """PTX without the statements that begin with a text."""
    return lambda ptx: re.sub(rf"^\s*{re.escape(text)}[^;]*;", "", ptx, flags=re.MULTILINE)


def changed(pattern: str, replacement: str) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        found, count = re.subn(pattern, replacement, ptx)
        if not count:
            raise ValueError(f"found no {pattern} in the PTX")
        return found

    return change


def _other_layout(ptx: str) -> str:
    """Matrix descriptors with a swizzle of 64 bytes where there was one of 128."""
    return re.sub(r"\b4[0-9]{18}\b", lambda found: str(int(found[0]) + (1 << 62) - (1 << 64)), ptx)


def unchanged(ptx: str) -> str:
    return ptx


# What is run, where, with which candidate, and with which change of its PTX.
PLANTS: dict[str, tuple[Callable[[], Any], str, int, Callable[[str], str]]] = {
    "product": (small_kernels.product, "sm_90", 0, unchanged),
    "product on sm_80": (small_kernels.product, "sm_80", 0, unchanged),
    "double": (small_kernels.double, "sm_90", 0, unchanged),
    "sum": (small_kernels.total, "sm_90", 0, unchanged),
    "reversing": (lambda: small_kernels.reversing(True), "sm_90", 0, unchanged),
    "reversing without a barrier": (
        lambda: small_kernels.reversing(False),
        "sm_90",
        0,
        unchanged,
    ),
    "missing barriers": (small_kernels.product, "sm_90", 0, without("bar.sync")),
    "missing barriers on sm_80": (small_kernels.product, "sm_80", 0, without("bar.sync")),
    "missing fence": (small_kernels.product, "sm_90", 0, without("fence.proxy.async")),
    "missing wait for copies": (small_kernels.product, "sm_90", 0, without("cp.async.wait_group")),
    "missing wait for products": (small_kernels.product, "sm_90", 0, without("wgmma.wait_group")),
    "missing wait for one product": (
        lambda: small_kernels.product(num_blocks=1), "sm_90", 0, without("wgmma.wait_group"),
    ),
    "wrong swizzle": (small_kernels.product, "sm_90", 0, _other_layout),
    "wrong swizzle on sm_80": (
        small_kernels.product, "sm_80", 0, changed(r"(xor\.b32 .*), 32;", r"\1, 64;"),
    ),
    "load past the end": (
        small_kernels.double, "sm_90", 0, changed(r"@%p\d+ (ld\.global)", r"\1"),
    ),
    "store past the end": (
        small_kernels.double, "sm_90", 0, changed(r"@%p\d+ (st\.global)", r"\1"),
    ),
    "address out of shared memory": (
        small_kernels.product, "sm_80", 0, changed("global_smem;", "1000000;"),
    ),
    "stores to one address": (
        small_kernels.product,
        "sm_90",
        0,
        changed(r"(st\.shared\.v4\.b32 \[) %r\d+", r"\1 global_smem"),
    ),
    "another candidate": (small_kernels.total, "sm_90", 1, unchanged),
    "two programs, one place": (small_kernels.two_programs, "sm_90", 0, unchanged),
}  # fmt: skip


def outcome(run: Callable[[], Any], target: str, candidate: int, change: Any) -> str:
    with emulating(target, change), configuration(candidate):
        try:
            found, wanted = run()
        except FaultError as error:
            return str(error)
    is_right = ((found - wanted).abs() <= 1e-2 + 1e-2 * wanted.abs()).all()
    return "right" if is_right else "wrong"


def main() -> None:
    print(json.dumps({name: outcome(*plant) for name, plant in PLANTS.items()}))
    if len(sys.argv) > 1:
        with emulating("sm_90"):
            agreed = {
                "numbers": small_kernels.numbers(),
                "product": small_kernels.product(torch.float32, 16)[0],
            }
        torch.save(agreed, sys.argv[1])


if __name__ == "__main__":
    main()
