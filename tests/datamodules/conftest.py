from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.resumable import Cursor, prepare_shards
from longhaul.datamodules.shards import Block

BLOCK_TOKENS = 64
MakeShards = Callable[..., Manifest]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class CountingBlocks:
    """Block b holds the numbers from b * BLOCK_TOKENS on, so a token shows its origin."""

    version = 1

    def __init__(self, count: int) -> None:
        self.count = count

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        for number in range(cursor[0] if cursor else 0, self.count):
            start = number * BLOCK_TOKENS
            yield Block(np.arange(start, start + BLOCK_TOKENS, dtype=np.uint32)), [number + 1]


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    def make(blocks: int = 10, docs_per_shard: int = 3, name: str = "shards") -> Manifest:
        vocab_size = blocks * BLOCK_TOKENS + 1
        template = Manifest(
            tokenizer="bytes",
            tokenizer_sha256=f"{vocab_size}",
            vocab_size=vocab_size,
            bos_id=vocab_size - 1,
            eot_id=vocab_size - 1,
            document_tokens=BLOCK_TOKENS,
            dtype="uint32",
            source={"blocks": blocks},
            shards=(),
        )
        return prepare_shards(
            tmp_path / name,
            template,
            CountingBlocks(blocks),
            docs_per_shard=docs_per_shard,
            prefix="train",
            progress=lambda tokens: None,
        )

    return make
