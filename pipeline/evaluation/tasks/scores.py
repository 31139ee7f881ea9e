"""Attention scores of softmax kinds, before the softmax, of the first window's last token (at most
4096 tokens), and the largest of all.

A model that extrapolates badly has outliers among them. Figure 8 and section 4.5 of CoCA (Zhu et
al., 2023, arXiv:2309.08646): layers at a quarter, a half and three quarters of the depth ("low
layers"), and the last one, on one text about four times as long as in training; a second part of
the figure enlarges its last 500 tokens.

The article does not say which of the scores it draws. Its text reads the enlarged end as attention
to "neighboring tokens", so here they are those of the last token, mean over heads. They are divided
by sqrt(K), as the softmax takes them; the article's equations 2 and 8 are not, which changes no
ratio of two models with heads of one width.
"""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.modules.attention.fused import FusedAttention
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.options import BosOptions, ContextOptions, TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.tasks.attention import attention_inputs
from longhaul.pipeline.evaluation.windows import longest_document, read_windows
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions, ContextOptions, BosOptions):
    is_shared = False


_Score = Annotated[float, tables.number(-tables.MOST, tables.MOST)]


@dataclass(frozen=True)
class _Row:
    """Of one key, as LayerScores."""

    layer: tables.Positive
    key: tables.Positive
    score: _Score
    least_of_heads: _Score
    most_of_heads: _Score
    largest: tables.Magnitude
    bos: tables.Bos


def _chart(is_low: bool, is_end: bool) -> tables.Chart:
    """A part of figure 8 of CoCA: the last layer or the others, whole or enlarged."""

    def curve(rows: tables.Rows) -> tables.Curve:
        last = max(row["layer"] for row in rows)
        first = figures.enlarged_from(max(row["key"] for row in rows)) if is_end else 1
        by_key: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            if (row["layer"] < last) is is_low and row["key"] >= first:
                by_key[row["key"]].append(row)
        keys = sorted(by_key)
        low = [min(row["least_of_heads"] for row in by_key[key]) for key in keys]
        high = [max(row["most_of_heads"] for row in by_key[key]) for key in keys]
        mean = [fmean(row["score"] for row in by_key[key]) for key in keys]
        bos = [rows[0]["bos"]] * len(keys)
        found = {"key": keys, "least": low, "most": high, "bos": bos, "score": mean}
        return tables.Curve(found, (low, high))

    def caption(of_runs: Sequence[tables.Rows]) -> str:
        layers = sorted({row["layer"] for rows in of_runs for row in rows})
        shown = ", ".join(map(str, layers[:-1] if is_low else layers[-1:]))
        return (
            f"Mean over heads and layers; bands: from the least to the most of them. Layers: "
            f"{shown}; {tables.options_in_words(of_runs, tables.BOS_COLUMN)}."
        )

    layers = "low layers" if is_low else "last layer"
    return tables.Chart(
        name=f"scores_{'low' if is_low else 'last'}{'_end' if is_end else ''}",
        curve=curve,
        caption=caption,
        title=f"Scores of the last token, {layers}{', enlarged' if is_end else ''}",
        x_label="position of the key (tokens)",
        y_label="attention score before the softmax",
        x_axis="position",
        y_axis="score",
        is_over_tokens=False,
    )


def _outliers(of_runs: Sequence[tables.Rows]) -> list[list[float]]:
    """The largest scores, which section 4.5 of CoCA compares between models."""
    largest = []
    for rows in of_runs:
        last = max(row["layer"] for row in rows)
        parts = [
            [row["largest"] for row in rows if (row["layer"] < last) is low]
            for low in (True, False)
        ]
        largest.append([max(part, default=math.nan) for part in parts])
    most = [max(filter(math.isfinite, parts)) for parts in largest]
    least = min(most)
    return [
        [max(row["key"] for row in rows), *parts, one / least if least else math.nan]
        for rows, parts, one in zip(of_runs, largest, most, strict=True)
    ]


TABLES = (
    tables.TaskTable(
        name="scores",
        row=_Row,
        title="Attention scores of the last token",
        measured_by="--tasks scores --context N, of a softmax kind",
        options=tables.BOS_COLUMN,
        charts=[_chart(*which) for which in itertools.product((True, False), repeat=2)],
        is_of_one_scaling=True,
        summary=tables.Summary(
            title="Largest attention scores before the softmax",
            caption=lambda of_runs: (
                "Absolute scores of all tokens for all before them, in all heads; the last column "
                "is the largest over that of the run where it is least; "
                f"{tables.options_in_words(of_runs, tables.BOS_COLUMN)}"
            ),
            columns=("tokens", "low layers", "last layer", "outliers (ratio to the least)"),
            rows=_outliers,
        ),
    ),
)

LONGEST = 4096
"""Most tokens of text that are read; scores of a layer are heads times the square of that."""


class LayerScores(NamedTuple):
    """Scores of one layer, by the position of the key."""

    layer: int
    """Counted from 1, as in the source."""
    mean: Float[Tensor, "T"]
    """Scores of the last token, mean over heads."""
    least: Float[Tensor, "T"]
    """The same, of the head in which it is least."""
    most: Float[Tensor, "T"]
    """The same, of the head in which it is most."""
    largest: Float[Tensor, "T"]
    """The largest absolute score that any token from the key on has for it, in any head."""


def chosen_layers(num_layers: int) -> list[int]:
    """The layers at quarters of the depth, counted from 1: 6, 12, 18 and 24 of 24."""
    return sorted({-(-num_layers * quarter // 4) for quarter in (1, 2, 3, 4)})


def layer_scores(scores: Float[Tensor, "H T T"], layer: int) -> LayerScores:
    """What is reported of a layer's scores; those of later keys are left out."""
    last = scores[:, -1].float()
    # A column holds the scores for one key, from its own token down.
    largest = scores.tril().abs().amax(dim=(0, 1)).float()
    return LayerScores(layer, last.mean(0), last.amin(0), last.amax(0), largest)


def _softmax_layer(model: LanguageModel, layer: int) -> FusedAttention:
    """The attention of a layer, counted from 1; ValueError if its kind has no scores."""
    attention = cast(Block, model.blocks[layer - 1]).attention
    if not isinstance(attention, FusedAttention):
        raise ValueError(
            f"attention.kind: found {attention.config.kind} with the task scores, wanted a kind "
            "with a softmax"
        )
    return attention


def check(trained: TrainedModel, options: Options) -> None:
    for layer in chosen_layers(len(trained.model.blocks)):
        _softmax_layer(trained.model, layer)
    read_windows(trained, options, min(trained.config.data.context, LONGEST))


@torch.no_grad()
def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    context = min(trained.config.data.context, LONGEST)
    batch = next(iter(read_windows(trained, options, context)))
    tokens = batch["target" if options.no_bos else "input"][:1, longest_document(batch, 0)]
    tokens, context = tokens.to(trained.device), tokens.shape[1]
    inputs = attention_inputs(trained.model, tokens)
    layers = [
        layer_scores(_softmax_layer(trained.model, layer).logits(inputs[layer - 1])[0], layer)
        for layer in chosen_layers(len(inputs))
    ]
    table, picture, end = (folder / name for name in ("scores.csv", "scores.png", "scores_end.png"))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["layer", "key", "score", "least_of_heads", "most_of_heads", "largest"]
        writer.writerow([*names, "bos"])
        for layer, *columns in layers:
            for key, row in enumerate(
                zip(*(one.tolist() for one in columns), strict=True), start=1
            ):
                writer.writerow([layer, key, *(f"{score:.6g}" for score in row), options.bos])
    title = f"{trained.config.name}, {label(trained, options)}"
    draw(picture, layers, title, 1)
    draw(end, layers, title, figures.enlarged_from(context))
    largest = max(one.largest.max().item() for one in layers)
    values = {f"{metric_prefix(trained, options)}/score_largest": largest}
    return TaskResult(values, (table, picture, end))


def draw(path: Path, layers: Sequence[LayerScores], title: str, first: int) -> None:
    """PNG of the last token's scores from the first of these keys on.

    A line for the low layers together and one for the last; bands go from the least head to the
    most.
    """
    *low, last = layers
    part = slice(first - 1, None)
    with figures.figure(path, title) as axes:
        for colour, some in ((figures.SKY, low), (figures.VERMILLION, [last])):
            if not some:
                continue  # a model of one layer
            keys = range(first, len(last.mean) + 1)
            least = torch.stack([one.least for one in some]).amin(0)[part]
            most = torch.stack([one.most for one in some]).amax(0)[part]
            mean = torch.stack([one.mean for one in some]).mean(0)[part]
            axes.fill_between(
                keys, least.tolist(), most.tolist(), color=colour, alpha=0.2, linewidth=0
            )
            numbers = ", ".join(str(one.layer) for one in some)
            name = f"layer {numbers}" if len(some) == 1 else f"layers {numbers}"
            axes.plot(keys, mean.tolist(), color=colour, linewidth=0.7, label=name)
        figures.positions_axis(axes, "position of the key (tokens)")
        axes.set_ylabel("score of the last token")
        figures.legend_below(axes)
