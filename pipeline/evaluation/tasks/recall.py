"""Zero-shot recall: share of values recalled from 4 to 128 key-value pairs, --prompts sequences per
number of pairs.

A sequence holds pairs of tokens, then the same pairs again in another order. States of fixed size
fail here first: the model must remember every pair of the sequence, and nothing else in the
sequence helps. This is not the multi-query associative recall of Arora et al. (2023),
arXiv:2312.04927, on which models are trained: here values may repeat, queries follow at once, and
each one's answer is shown before the next.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.options import TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import read_windows, shifted
from longhaul.pipeline.generation.decoding import tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    prompts: int = 20
    """Sequences per number of pairs."""


@dataclass(frozen=True)
class _Row:
    pairs: tables.Positive
    queries: tables.Positive
    right: tables.Count
    low: tables.Share
    high: tables.Share
    chance: tables.Share


def _curve(rows: tables.Rows) -> tables.Curve:
    found = tables.columns(rows, "pairs", "right", "queries", "low", "high")
    found["share"] = [row["right"] / row["queries"] for row in rows]
    return tables.Curve(found, (found["low"], found["high"]))


def _random_guess(of_runs: Sequence[tables.Rows]) -> tuple[str, float]:
    return "random guess", fmean({row["chance"] for rows in of_runs for row in rows})


TABLES = (
    tables.TaskTable(
        name="recall",
        row=_Row,
        title="Values recalled",
        measured_by="--tasks recall",
        most=("right", "queries"),
        charts=[
            tables.Chart(
                name="recall",
                curve=_curve,
                caption=lambda of_runs: (
                    "Zero-shot recall: a sequence holds pairs of tokens, then the same pairs in "
                    "another order. Bands: Wilson 95 %, from the standard error over sequences."
                ),
                x_label="pairs in the sequence",
                y_label="values recalled (share)",
                y_axis="share",
                is_over_tokens=False,
                reference=_random_guess,
            )
        ],
    ),
)

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
def count_recalled(
    model: LanguageModel, batch: RecallBatch, bos_id: int, vocabulary: int, precision: str
) -> Int[Tensor, "B"]:
    """The number of each sequence's queries whose likeliest next token is the right value."""
    tokens, is_query = batch
    device = next(model.parameters()).device
    given = shifted(tokens, bos_id).to(device)
    # The input is shifted: a query at t is read at t + 1, where token t + 1 is predicted.
    is_answer = is_query.roll(1, dims=1)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        hidden, _ = model.activations(given)
        logits = model.head(hidden[is_answer.to(device)])
    predicted = logits[:, :vocabulary].argmax(dim=-1).cpu()
    right: Tensor = (predicted == tokens[is_answer]).view(len(tokens), -1).sum(dim=1)
    return right


def check(trained: TrainedModel, options: Options) -> None:
    if options.prompts < 1:
        raise ValueError(f"--prompts: found {options.prompts}, wanted 1 or more")
    read_windows(trained, options, trained.config.data.context)


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    corpus = trained.corpus
    keys, values = _known_ids(trained, options, {corpus.bos_id, corpus.eot_id})
    sizes = [size for size in SIZES if size <= len(keys)]
    if not sizes:
        raise ValueError(
            f"recall: found {2 * len(keys)} ids in the text, wanted {2 * SIZES[0]} or more"
        )
    results: dict[int, list[int]] = {}  # right answers of each sequence, by size
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
            counts = list[list[int]]()
            parts = zip(*(one.split(at_once) for one in batch), strict=True)
            for part in trained.ranks.share(parts):
                right = count_recalled(
                    trained.model,
                    RecallBatch(*part),
                    corpus.bos_id,
                    corpus.vocab_size,
                    trained.config.trainer.precision,
                )
                counts.append(right.tolist())
                progress.add(part[0].numel())
            results[size] = [right for some in trained.ranks.gather(counts) for right in some]
    shares = {size: [right / size for right in counts] for size, counts in results.items()}
    bands = {size: figures.clustered_interval(of_size, size) for size, of_size in shares.items()}
    table, picture = folder / "recall.csv", folder / "recall.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["accuracy", "standard_error", "low", "high", "chance"]
        writer.writerow(["pairs", "sequences", "queries", "right", *names])
        for size, rights in results.items():
            error = figures.standard_error(shares[size])
            numbers = fmean(shares[size]), error, *bands[size], 1 / len(values)
            row = [size, len(rights), size * len(rights), sum(rights)]
            writer.writerow([*row, *(f"{number:.4f}" for number in numbers)])
    accuracies = {size: fmean(of_size) for size, of_size in shares.items()}
    with figures.figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        low, high = zip(*bands.values(), strict=True)
        axes.fill_between(sizes, low, high, color=figures.BLUE, alpha=0.15, linewidth=0)
        axes.plot(sizes, list(accuracies.values()), "o-", color=figures.BLUE)
        axes.axhline(1 / len(values), color="black", linestyle=":", label="random guess")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("pairs in the sequence")
        axes.set_ylabel("values recalled (share)")
        figures.legend_below(axes)
    prefix = metric_prefix(trained, options)
    named = {f"{prefix}/recall_{size:06d}": share for size, share in accuracies.items()}
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
