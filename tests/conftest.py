"""Triton's kernels run in its interpreter, on any machine, wherever a test asks for them."""

import os

# Before anything imports Triton: many packages do, and what it decorates is then compiled for good.
os.environ.setdefault("TRITON_INTERPRET", "1")
