"""Multi-query associative recall: key-value pairs of tokens, then the keys again in another order.

After Arora et al. (2023), arXiv:2312.04927. States of fixed size fail here first: the model must
remember every pair of the sequence, and nothing else in the sequence helps.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.figures import BLUE, figure, legend_below, wilson_interval
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.task import Options, TaskResult
from longhaul.pipeline.evaluation.windows import read_windows, shifted
from longhaul.pipeline.generation.decoding import tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel

SIZES = (4, 8, 16, 32, 64, 128)
"""Pairs per sequence; sizes for which the text has too few distinct tokens are skipped."""


class RecallBatch(NamedTuple):
    """Sequences k_1 v_1 ... k_n v_n, then the same pairs in another order."""

    tokens: Int[Tensor, "B T"]
    is_query: Bool[Tensor, "B T"]
    """True where a key appears for the second time, so that the token after it is determined."""


def make_recall(
    keys: Int[Tensor, "K"],
    values: Int[Tensor, "V"],
    *,
    num_pairs: int,
    count: int,
    generator: torch.Generator,
) -> RecallBatch:
    """Draw sequences of pairs: distinct keys, each with any value. They do not contain the bos id.

    Args:
        keys, values: ids to draw from.
        num_pairs: pairs per sequence, at most len(keys).
        count: number of sequences.
        generator: the only source of randomness.
    """
    if not 1 <= num_pairs <= len(keys):
        raise ValueError(
            f"num_pairs: found {num_pairs}, wanted 1 to {len(keys)}, the number of keys"
        )
    first = torch.rand(count, len(keys), generator=generator).argsort(dim=1)[:, :num_pairs]
    key = keys[first]  # (B, num_pairs)
    value = values[torch.randint(len(values), (count, num_pairs), generator=generator)]
    order = torch.rand(count, num_pairs, generator=generator).argsort(dim=1)
    pairs = torch.stack([key, value], dim=2)  # (B, num_pairs, 2)
    repeated = torch.stack([key.gather(1, order), value.gather(1, order)], dim=2)
    tokens = torch.cat([pairs, repeated], dim=1).flatten(1)  # (B, 4 num_pairs)
    is_query = torch.zeros_like(tokens, dtype=torch.bool)
    is_query[:, 2 * num_pairs :: 2] = True
    return RecallBatch(tokens, is_query)


@torch.no_grad()
def recall_accuracy(
    model: LanguageModel, batch: RecallBatch, bos_id: int, vocabulary: int, precision: str
) -> tuple[int, int]:
    """The number of queries whose likeliest next token is the right value, and of all queries."""
    tokens, is_query = batch
    device = next(model.parameters()).device
    given = shifted(tokens, bos_id).to(device)
    # The input is shifted: a query at t is read at t + 1, where token t + 1 is predicted.
    is_answer = is_query.roll(1, dims=1)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        hidden, _ = model.activations(given)
        logits = model.head(hidden[is_answer.to(device)])
    predicted = logits[:, :vocabulary].argmax(dim=-1).cpu()
    right = predicted == tokens[is_answer]
    return int(right.sum()), right.numel()


def check(trained: TrainedModel, options: Options) -> None:
    if options.prompts < 1:
        raise ValueError(f"--prompts: found {options.prompts}, wanted 1 or more")
    read_windows(trained, options, trained.config.data.context)


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    manifest = trained.manifest
    keys, values = _known_ids(trained, options, {manifest.bos_id, manifest.eot_id})
    sizes = [size for size in SIZES if size <= len(keys)]
    if not sizes:
        raise ValueError(
            f"recall: found {2 * len(keys)} ids in the text, wanted {2 * SIZES[0]} or more"
        )
    results: dict[int, tuple[int, int]] = {}  # right answers and queries, by size
    with trained.ranks.progress(4 * sum(sizes) * options.prompts, "recall") as progress:
        for size in sizes:
            batch = make_recall(
                keys,
                values,
                num_pairs=size,
                count=options.prompts,
                generator=torch.Generator().manual_seed(size),
            )
            at_once = max(1, tokens_per_pass(trained.device) // (4 * size))
            counts = []
            parts = zip(*(one.split(at_once) for one in batch), strict=True)
            for part in trained.ranks.share(parts):
                right_and_asked = recall_accuracy(
                    trained.model,
                    RecallBatch(*part),
                    manifest.bos_id,
                    manifest.vocab_size,
                    trained.config.trainer.precision,
                )
                counts.append(right_and_asked)
                progress.add(part[0].numel())
            gathered = trained.ranks.gather(counts)
            results[size] = sum(r for r, _ in gathered), sum(asked for _, asked in gathered)
    table, picture = folder / "recall.csv", folder / "recall.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pairs", "sequences", "queries", "right", "accuracy", "chance"])
        for size, (right, asked) in results.items():
            shares = f"{right / asked:.4f}", f"{1 / len(values):.4f}"
            writer.writerow([size, options.prompts, asked, right, *shares])
    with figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        low, high = zip(*(wilson_interval(*counts) for counts in results.values()), strict=True)
        axes.fill_between(sizes, low, high, color=BLUE, alpha=0.15, linewidth=0)
        accuracies = [right / asked for right, asked in results.values()]
        axes.plot(sizes, accuracies, "o-", color=BLUE)
        axes.axhline(1 / len(values), color="black", linestyle=":", label="random guess")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("pairs in the sequence")
        axes.set_ylabel("values recalled (share)")
        legend_below(axes)
    prefix = metric_prefix(trained, options)
    named = {f"{prefix}/recall_{s:06d}": right / asked for s, (right, asked) in results.items()}
    return TaskResult(named, (table, picture))


def _known_ids(
    trained: TrainedModel, options: Options, special: set[int]
) -> tuple[Int[Tensor, "K"], Int[Tensor, "V"]]:
    """Ids of the text, half of them as keys and half as values.

    Only ids of the text: a model cannot recall ids that it has never seen.
    """
    batches = read_windows(trained, options, trained.config.data.context)
    seen = sorted({int(i) for batch in batches for i in batch["target"].unique()} - special)
    ids = torch.tensor(seen)[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
    return ids[: len(ids) // 2], ids[len(ids) // 2 :]
