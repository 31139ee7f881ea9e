"""The tile sizes of all kernels that multiply matrices: the candidates of each, and its choice.

Candidates are what compiles for the chips of kernels/offline with no more spills than
kernels/offline/table.py lists. The first one runs, also in the interpreter, except on chips that
are named beside the candidates, as in `candidates(..., sm_90=1)`. Of all chips only sm_90 has been
timed: results/h100.json.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.common.triton.launch import Candidates, candidates, config, is_interpreted


class ChunkedCandidates(NamedTuple):
    """Candidates of one kernel of the chunked form."""

    narrow: Candidates  # bfloat16, narrow keys and values; of degree 4 only gradients of keys
    wide: Candidates  # bfloat16, other calls
    float32: Candidates  # float16 too: its products have TF32 operands

    def of(self, dtype: torch.dtype, *, is_narrow: bool) -> Candidates:
        if dtype != torch.bfloat16:
            return self.float32
        return self.narrow if is_narrow else self.wide


# Sums of chunks, and states of a sequence in one pass. At degree 1 and 2, `configuration(0)` runs
# the former and `configuration(n)` candidate n of the latter, whose first is there twice for that.
SUMS = ChunkedCandidates(
    narrow=candidates(config(4, 2, BLOCK_T=64)),
    wide=candidates(config(8, 2, BLOCK_T=32)),
    float32=candidates(config(8, 2, BLOCK_T=32)),
)
WALK = ChunkedCandidates(
    narrow=candidates(
        config(4, 2, BLOCK_T=64),
        config(4, 2, BLOCK_T=64),
        config(8, 2, BLOCK_T=64),
        sm_80=2,
        sm_86=2,
        sm_89=2,
        sm_120=2,
    ),
    wide=candidates(config(8, 2, BLOCK_T=32)),
    float32=candidates(config(8, 2, BLOCK_T=32)),
)
READ = ChunkedCandidates(
    narrow=candidates(
        config(8, 2, BLOCK_T=128, BLOCK_N=64),
        config(4, 3, BLOCK_T=64, BLOCK_N=64),
        gfx942=1,
        sm_90=1,
    ),
    wide=candidates(config(8, 2, BLOCK_T=64, BLOCK_N=32)),
    float32=candidates(config(8, 2, BLOCK_T=32, BLOCK_N=16)),
)
QUERY_GRADIENT = ChunkedCandidates(
    narrow=candidates(
        config(8, 2, BLOCK_T=128, BLOCK_N=32), config(4, 2, BLOCK_T=64, BLOCK_N=32), sm_90=1
    ),
    wide=candidates(config(8, 2, BLOCK_T=64, BLOCK_N=32)),
    float32=candidates(config(4, 2, BLOCK_T=32, BLOCK_N=16)),
)
KEY_GRADIENT = ChunkedCandidates(
    narrow=candidates(
        config(8, 2, BLOCK_N=128, BLOCK_T=32),
        config(4, 2, BLOCK_N=64, BLOCK_T=32),
        gfx942=1,
        sm_90=1,
    ),
    wide=candidates(config(8, 2, BLOCK_N=64, BLOCK_T=16)),
    float32=candidates(config(8, 1, BLOCK_N=32, BLOCK_T=32)),
)


class Blocks(NamedTuple):
    """Block sizes of queries and keys, and the candidates.

    All candidates share the two sizes, because tables of blocks and of decays depend on them.
    BLOCK_D is the smaller block where decays form a matrix, which needs many registers.
    """

    queries: int
    keys: int
    candidates: Candidates


def blocks(
    queries: int, keys: int, diagonal: int, *warps_and_stages: tuple[int, int], **chosen: int
) -> Blocks:
    """Blocks with one candidate for each pair (warps, stages)."""
    configs = (config(warps, stages, BLOCK_D=diagonal) for warps, stages in warps_and_stages)
    return Blocks(queries, keys, candidates(*configs, **chosen))


class AttentionBlocks(NamedTuple):
    """Blocks of one kernel of the attention form: for K and V up to 64, up to 128, and wider."""

    bfloat16: tuple[Blocks, Blocks, Blocks]
    float16: tuple[Blocks, Blocks, Blocks]
    float32: tuple[Blocks, Blocks, Blocks]
    interpreted: Blocks

    def of(self, q: Tensor, v: Tensor) -> Blocks:
        if is_interpreted():
            return self.interpreted
        by_dtype = {torch.bfloat16: self.bfloat16, torch.float16: self.float16}
        width = max(q.shape[3], v.shape[3])
        return by_dtype.get(q.dtype, self.float32)[0 if width <= 64 else 1 if width <= 128 else 2]


ATTENTION_FORWARD = AttentionBlocks(
    bfloat16=(
        blocks(128, 64, 16, (4, 3), (8, 3), (8, 2)),
        blocks(128, 64, 32, (8, 2)),
        blocks(64, 16, 16, (4, 2)),
    ),
    float16=(
        blocks(128, 64, 16, (8, 2)),
        blocks(64, 32, 16, (4, 2)),
        blocks(32, 16, 16, (4, 1)),
    ),
    float32=(
        # With 8 warps, the ptxas of Triton 3.6 reads past the shared memory: seen on an H200.
        blocks(64, 32, 16, (4, 2)),
        blocks(32, 16, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
    ),
    interpreted=blocks(32, 16, 16, (4, 1)),
)
ATTENTION_QUERY_GRADIENT = AttentionBlocks(
    bfloat16=(
        blocks(128, 64, 32, (8, 3), (8, 2)),
        blocks(64, 32, 32, (4, 2)),
        blocks(32, 16, 16, (4, 1)),
    ),
    float16=(
        blocks(128, 32, 16, (8, 2)),
        blocks(64, 16, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
    ),
    float32=(
        blocks(32, 32, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
    ),
    interpreted=blocks(32, 16, 16, (4, 1)),
)
ATTENTION_KEY_GRADIENT = AttentionBlocks(
    bfloat16=(
        blocks(32, 128, 32, (8, 2)),
        blocks(32, 64, 16, (8, 2)),
        blocks(16, 32, 16, (8, 1)),
    ),
    float16=(
        blocks(32, 128, 16, (8, 1)),
        blocks(32, 64, 16, (8, 1)),
        blocks(16, 16, 16, (4, 1)),
    ),
    float32=(
        blocks(16, 32, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
        blocks(16, 16, 16, (4, 1)),
    ),
    interpreted=blocks(16, 32, 16, (4, 1)),
)


def every_candidates() -> dict[str, Candidates]:
    """All candidates, by the kernel and the calls that they are for."""
    chunked = {
        "sums of chunks": SUMS,
        "states of a sequence": WALK,
        "read-out": READ,
        "query gradient": QUERY_GRADIENT,
        "key and value gradients": KEY_GRADIENT,
    }
    attention = {
        "attention": ATTENTION_FORWARD,
        "attention, query gradient": ATTENTION_QUERY_GRADIENT,
        "attention, key and value gradients": ATTENTION_KEY_GRADIENT,
    }
    found = {
        f"{kernel}, {calls}": one
        for kernel, kinds in chunked.items()
        for calls, one in kinds._asdict().items()
    }
    return found | {
        f"{kernel}, {dtype}, K and V up to {width}": one.candidates
        for kernel, kinds in attention.items()
        for dtype in ("bfloat16", "float16", "float32")
        for width, one in zip((64, 128, 256), getattr(kinds, dtype), strict=True)
    }


# The largest number of candidates: every candidate of every kernel runs under one of
# `configuration(0)`, …, `configuration(MOST_CANDIDATES - 1)`.
MOST_CANDIDATES = max(len(one.configs) for one in every_candidates().values())


def choices(chip: str) -> dict[str, str]:
    """The configuration of every kernel on a chip in words, by the kernel and its calls."""
    found = {}
    for name, one in every_candidates().items():
        settings = one.configs[one.on(chip)].all_kwargs()
        del settings["num_ctas"]  # always 1
        words = " ".join(f"{key}={value}" for key, value in settings.items())
        found[name] = f"{words} (candidate {one.on(chip)} of {len(one.configs)})"
    return found
