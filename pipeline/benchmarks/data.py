"""The speed of longhaul's token stream and of stock webdataset on the same shards."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from torch.utils.data import DataLoader

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.resumable import Cursor, prepare_shards
from longhaul.datamodules.shards import Block

_VOCABULARY = 50_257
_BLOCKS = 256
_BLOCK_TOKENS = 65_536
_BLOCKS_PER_SHARD = 64
_CONTEXTS = (1024, 8192)
# One block: stock webdataset yields one at a time.
_TOKENS_PER_BATCH = 65_536
_WORKERS = (0, 1)
_ROUNDS = 5


def run() -> None:
    """Print the tokens/s of both, best of several interleaved rounds, and their ratio.

    17 million random tokens are first written to a temporary folder. They are in the page cache
    then, so that the readers are measured and not the disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        _compare(_write_shards(Path(folder) / "shards"))


class _RandomBlocks:
    version = 1

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        generator = np.random.default_rng(0)
        for number in range(_BLOCKS):
            tokens = generator.integers(0, _VOCABULARY, _BLOCK_TOKENS, np.uint16)
            yield Block(tokens), [number + 1]


def _write_shards(folder: Path) -> Corpus:
    template = Manifest(
        tokenizer="gpt2",
        tokenizer_sha256="",
        vocab_size=_VOCABULARY,
        bos_id=_VOCABULARY - 1,
        eot_id=_VOCABULARY - 1,
        document_tokens=_BLOCK_TOKENS,
        dtype="uint16",
        shards=(),
    )
    manifest = prepare_shards(
        folder,
        template,
        _RandomBlocks(),
        docs_per_shard=_BLOCKS_PER_SHARD,
        prefix="train",
        progress=lambda tokens: None,
    )
    return Corpus(manifest)


def _compare(corpus: Corpus) -> None:
    readers: dict[tuple[str, int], Callable[[], int]] = {}
    for workers in _WORKERS:
        readers["stock webdataset, blocks", workers] = _stock_reader(corpus, workers)
        for context in _CONTEXTS:
            readers[f"longhaul, windows of {context}", workers] = _our_reader(
                corpus, context, workers
            )
    best = dict.fromkeys(readers, 0.0)
    first: dict[tuple[str, int], float] = {}
    for _ in range(_ROUNDS):
        for key, read in readers.items():
            start = time.perf_counter()
            tokens = read()
            rate = tokens / (time.perf_counter() - start)
            first.setdefault(key, rate)
            best[key] = max(best[key], rate)
    print(f"{corpus.num_tokens:,} tokens per round, best of {_ROUNDS} rounds, hot cache")
    print("in the first round both readers open the shards, and longhaul checks their sha256\n")
    print(f"{'reader':<30} {'workers':>7} {'first':>14} {'best':>14}   {'of stock':>8}")
    for (name, workers), rate in best.items():
        ratio = rate / best["stock webdataset, blocks", workers]
        rates = f"{first[name, workers] / 1e6:>7.1f} Mtok/s {rate / 1e6:>7.1f} Mtok/s"
        print(f"{name:<30} {workers:>7} {rates}   {ratio:>7.2f}x")


def _stock_reader(corpus: Corpus, workers: int) -> Callable[[], int]:
    urls = [url for url, _ in corpus.files]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode()
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        collate_fn=_tokens_of,
        # As longhaul's.
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=workers > 0,
    )
    return lambda: sum(array.size for array in loader)


def _tokens_of(sample: Any) -> Any:
    return sample["tokens.npy"]


def _our_reader(corpus: Corpus, context: int, workers: int) -> Callable[[], int]:
    windows = corpus.num_tokens // context
    micro_batch = max(1, _TOKENS_PER_BATCH // context)
    data = TokenDataModule(
        DataConfig(manifest=corpus.location, context=context, workers=workers),
        seed=0,
        samples_per_update=micro_batch,
        micro_batch=micro_batch,
        rank=0,
        world_size=1,
        num_samples=windows // micro_batch * micro_batch,
    )
    loader = data.train_dataloader()
    return lambda: sum(batch["target"].numel() for batch in loader)
