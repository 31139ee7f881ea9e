"""The tile sizes of all kernels that multiply matrices, and the configurations to tune for each.

Not yet timed on a GPU. They were chosen by what compiles for sm_80, sm_90 and sm_100 with no more
spills than kernels/offline/table.py lists, and the autotuner in launch.py chooses among them. The
interpreter runs the first of the chunked form's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.triton.launch import Configs, config, is_interpreted


class ChunkedConfigs(NamedTuple):
    """Configurations of one kernel of the chunked form."""

    narrow: Configs  # bfloat16, few features and values at a time
    wide: Configs  # bfloat16, more of either
    float32: Configs  # float16 too: its products have TF32 operands

    def of(self, dtype: torch.dtype, *, is_narrow: bool) -> Configs:
        if dtype != torch.bfloat16:
            return self.float32
        return self.narrow if is_narrow else self.wide


STATE = ChunkedConfigs(
    narrow=(config(4, 2, BLOCK_T=64), config(8, 2, BLOCK_T=64)),
    wide=(config(8, 2, BLOCK_T=32), config(8, 3, BLOCK_T=32)),
    float32=(config(8, 2, BLOCK_T=32),),
)
READ = ChunkedConfigs(
    narrow=(config(8, 2, BLOCK_T=128, BLOCK_N=64), config(4, 3, BLOCK_T=64, BLOCK_N=64)),
    wide=(config(8, 2, BLOCK_T=64, BLOCK_N=32),),
    float32=(config(8, 2, BLOCK_T=32, BLOCK_N=16),),
)
QUERY_GRADIENT = ChunkedConfigs(
    narrow=(config(8, 2, BLOCK_T=128, BLOCK_N=32), config(4, 2, BLOCK_T=64, BLOCK_N=32)),
    wide=(config(8, 2, BLOCK_T=64, BLOCK_N=32),),
    float32=(config(4, 2, BLOCK_T=32, BLOCK_N=16),),
)
KEY_GRADIENT = ChunkedConfigs(
    narrow=(config(8, 2, BLOCK_N=128, BLOCK_T=32), config(4, 2, BLOCK_N=64, BLOCK_T=32)),
    wide=(config(8, 2, BLOCK_N=64, BLOCK_T=32),),
    float32=(config(8, 1, BLOCK_N=32, BLOCK_T=32),),
)


class Blocks(NamedTuple):
    """Block sizes of queries and keys, and the configurations to tune.

    The autotuner does not change the two sizes, because tables of blocks and of decays depend on
    them. BLOCK_D is the smaller block where decays form a matrix, which needs many registers.
    """

    queries: int
    keys: int
    configs: Configs


def blocks(queries: int, keys: int, diagonal: int, *warps_and_stages: tuple[int, int]) -> Blocks:
    """Blocks with one configuration for each pair (warps, stages)."""
    configs = (config(warps, stages, BLOCK_D=diagonal) for warps, stages in warps_and_stages)
    return Blocks(queries, keys, tuple(configs))


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
        blocks(64, 32, 16, (8, 2)),
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
