"""Multi-query associative recall: pairs of tokens, then their first halves in another order.

After Arora et al. (2023), arXiv:2312.04927. States of fixed size fail here first: a sequence has as
many pairs as are to be remembered, and nothing else in it helps.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longhaul.datamodules.manifest import load_manifest
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.figures import BLUE, figure, wilson_interval
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.task import Options, TaskResult
from longhaul.pipeline.evaluation.windows import read_windows, shifted
from longhaul.pipeline.generation.decoding import TOKENS_AT_ONCE
from longhaul.pipeline.runs.trained_model import TrainedModel

SIZES = (4, 8, 16, 32, 64, 128)
"""Pairs a sequence; of these what the known tokens suffice for."""


class RecallBatch(NamedTuple):
    """Sequences k_1 v_1 ... k_n v_n, then the same pairs in another order."""

    tokens: Int[Tensor, "B T"]
    is_query: Bool[Tensor, "B T"]
    """Where a key stands for the second time: the token after it is known then."""


def make_recall(
    keys: Int[Tensor, "K"],
    values: Int[Tensor, "V"],
    *,
    num_pairs: int,
    count: int,
    generator: torch.Generator,
) -> RecallBatch:
    """Sequences of pairs of distinct keys, each with any value, the bos id not among them.

    Args:
        keys, values: ids to draw from.
        num_pairs: keys a sequence, at most as many as there are.
        count: sequences.
        generator: what is drawn depends on it alone.
    """
    if not 1 <= num_pairs <= len(keys):
        raise ValueError(f"num_pairs: found {num_pairs}, wanted 1 to {len(keys)}, the keys")
    first = torch.rand(count, len(keys), generator=generator).argsort(dim=1)[:, :num_pairs]
    key = keys[first]  # (B, num_pairs)
    value = values[torch.randint(len(values), (count, num_pairs), generator=generator)]
    order = torch.rand(count, num_pairs, generator=generator).argsort(dim=1)
    pairs = torch.stack([key, value], dim=2)  # (B, num_pairs, 2)
    asked = torch.stack([key.gather(1, order), value.gather(1, order)], dim=2)
    tokens = torch.cat([pairs, asked], dim=1).flatten(1)  # (B, 4 num_pairs)
    is_query = torch.zeros_like(tokens, dtype=torch.bool)
    is_query[:, 2 * num_pairs :: 2] = True
    return RecallBatch(tokens, is_query)


@torch.no_grad()
def recall_accuracy(
    model: LanguageModel, batch: RecallBatch, bos_id: int, vocabulary: int, precision: str
) -> tuple[int, int]:
    """Queries whose likeliest next token is the value, and all queries."""
    tokens, is_query = batch
    device = next(model.parameters()).device
    given = shifted(tokens, bos_id).to(device)
    # A query at t is the input at t + 1, from which the token at t + 1 is told.
    asked = is_query.roll(1, dims=1)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        hidden, _ = model(given)
        logits = model.head(hidden[asked.to(device)])
    told = logits[:, :vocabulary].argmax(dim=-1).cpu()
    right = told == tokens[asked]
    return int(right.sum()), right.numel()


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    if options.prompts < 1:
        raise ValueError(f"--prompts: found {options.prompts}, wanted 1 or more")
    manifest = load_manifest(trained.config.data.manifest)
    keys, values = _known_ids(trained, options, {manifest.bos_id, manifest.eot_id})
    sizes = [size for size in SIZES if size <= len(keys)]
    if not sizes:
        raise ValueError(f"recall: found {2 * len(keys)} ids in the text, wanted {2 * SIZES[0]}")
    found: dict[int, tuple[int, int]] = {}
    with trained.ranks.progress(4 * sum(sizes) * options.prompts, "recall") as progress:
        for size in sizes:
            batch = make_recall(
                keys,
                values,
                num_pairs=size,
                count=options.prompts,
                generator=torch.Generator().manual_seed(size),
            )
            at_once = max(1, TOKENS_AT_ONCE // (4 * size))
            counts = []
            parts = zip(*(one.split(at_once) for one in batch), strict=True)
            for part in trained.ranks.share(parts):
                told = recall_accuracy(
                    trained.model,
                    RecallBatch(*part),
                    manifest.bos_id,
                    manifest.vocab_size,
                    trained.config.trainer.precision,
                )
                counts.append(told)
                progress.add(part[0].numel())
            of_all = trained.ranks.gather(counts)
            found[size] = sum(right for right, _ in of_all), sum(asked for _, asked in of_all)
    table, picture = folder / "recall.csv", folder / "recall.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pairs", "sequences", "queries", "right", "accuracy", "chance"])
        for size, (right, asked) in found.items():
            shares = f"{right / asked:.4f}", f"{1 / len(values):.4f}"
            writer.writerow([size, options.prompts, asked, right, *shares])
    with figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        low, high = zip(*(wilson_interval(*counts) for counts in found.values()), strict=True)
        axes.fill_between(sizes, low, high, color=BLUE, alpha=0.15, linewidth=0)
        shares_told = [right / asked for right, asked in found.values()]
        axes.plot(sizes, shares_told, "o-", color=BLUE)
        axes.axhline(1 / len(values), color="black", linestyle=":", label="guess of a value")
        axes.set_xscale("log", base=2)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("pairs in the sequence")
        axes.set_ylabel("values recalled (share)")
        axes.legend(frameon=False)
    prefix = metric_prefix(trained, options)
    named = {f"{prefix}/recall_{s:06d}": right / asked for s, (right, asked) in found.items()}
    return TaskResult(named, (table, picture))


def _known_ids(
    trained: TrainedModel, options: Options, special: set[int]
) -> tuple[Int[Tensor, "K"], Int[Tensor, "V"]]:
    """Ids of the text in two halves: a model cannot recall what it has never seen."""
    batches = read_windows(trained, options, trained.config.data.context)
    seen = sorted({int(i) for batch in batches for i in batch["target"].unique()} - special)
    ids = torch.tensor(seen)[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
    return ids[: len(ids) // 2], ids[len(ids) // 2 :]
