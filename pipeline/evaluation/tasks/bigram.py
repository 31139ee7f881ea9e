"""Loss of a bigram model counted on the same training text.

Any language model must beat it. The figure of the task positions shows it, which runs later.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import corpus_of
from longhaul.datamodules.loaders import open_stores
from longhaul.pipeline.evaluation.labels import metric_prefix
from longhaul.pipeline.evaluation.options import ContextOptions, TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import read_windows
from longhaul.pipeline.runs.data import moved_data_are_explained
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions, ContextOptions):
    is_shared = False


LARGEST_VOCABULARY = 4096
"""Above this, the dense table of counts would not fit, and most pairs would never be seen."""


def pair_counts(read: np.ndarray, following: np.ndarray, vocabulary: int) -> np.ndarray:
    """How often token b follows a, as [a, b]."""
    pairs = read.astype(np.int64) * vocabulary + following
    return np.bincount(pairs, minlength=vocabulary**2).reshape(vocabulary, vocabulary)


def count_bigrams(data: DataConfig) -> np.ndarray:
    """`pair_counts` of all training blocks together.

    Where documents do not see each other, the bos id is read before the first token of each.
    """
    corpus = corpus_of(data)
    has_mask = data.document_mask and corpus.has_ends
    counts = np.zeros((corpus.vocab_size, corpus.vocab_size), dtype=np.int64)
    for source, store in zip(corpus.sources, open_stores(data, corpus), strict=True):
        for position in range(len(store)):
            shard = store[position]
            for number, start in enumerate(shard.starts):
                block = shard.tokens[start : start + source.document_tokens]
                read = block[:-1]
                if has_mask and shard.ends:
                    read = read.copy()
                    read[shard.ends[number][:-1] - 1] = corpus.bos_id
                counts += pair_counts(read, block[1:], corpus.vocab_size)
    return counts


def log_probabilities(pairs: np.ndarray) -> Float64[Tensor, "V V"]:
    """log p(b | a) as [a, b], in nats, from how often each pair occurs.

    p(b | a) = (count(a, b) + s p(b)) / (count(a) + s), with p(b) from counts too, and s = 1.
    """
    counts = torch.from_numpy(pairs).double()
    single = counts.sum(0) + 1
    single = single / single.sum()
    return ((counts + single) / (counts.sum(1, keepdim=True) + 1)).log()


def bigram_loss(pairs: np.ndarray, batches: Iterable[dict[str, Tensor]]) -> float:
    """Mean loss in nats per token, over the same validation samples that a model is measured on."""
    table = log_probabilities(pairs)
    total, count = 0.0, 0
    for batch in batches:
        real = batch["index"] >= 0
        losses = -table[batch["input"][real], batch["target"][real]]
        total += losses.sum().item()
        count += losses.numel()
    return total / count


def check(trained: TrainedModel, options: Options) -> None:
    vocabulary = trained.corpus.vocab_size
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(
            f"bigram: found a vocabulary of {vocabulary}, wanted at most {LARGEST_VOCABULARY}"
        )
    read_windows(trained, options, trained.config.data.context)


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    with moved_data_are_explained("manifest"):
        pairs = count_bigrams(trained.config.data)
    loss = bigram_loss(pairs, read_windows(trained, options, trained.config.data.context))
    return TaskResult({f"{metric_prefix(trained, options)}/bigram_loss": loss})
