"""Mixing matrices, their outliers, half-lives of gates and rates of rotation, on the first 8
windows (of at most 1024 tokens).
"""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Annotated, Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from longhaul.modules.attention import Attention
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.options import ContextOptions, TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import longest_document, read_windows
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions, ContextOptions):
    is_shared = False


_Spread = Annotated[float, tables.number(0, tables.MOST, or_nan=True)]
_HalfLife = Annotated[float, tables.number(0, tables.MOST, or_inf=True)]
_MaybeNan = Annotated[float, tables.number(-tables.MOST, tables.MOST, or_nan=True)]


@dataclass(frozen=True)
class _Row:
    """Of one mixing matrix, as HeadReport."""

    layer: tables.Count
    matrix: tables.Count
    largest: tables.Magnitude
    first_token_share: tables.Share
    kurtosis: _MaybeNan
    half_life: _HalfLife
    rotation: _MaybeNan
    first_token_share_standard_error: _Spread
    kurtosis_standard_error: _Spread
    half_life_standard_error: _Spread
    windows: tables.Positive


def _summary_caption(of_runs: Sequence[tables.Rows]) -> str:
    windows = [row["windows"] for rows in of_runs for row in rows]
    fewest, most = min(windows), max(windows)
    read = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"Of absolute weights in the last half of each window, of which there were {read}: the "
        "largest of all, and means; half-lives are of heads that forget. Errors are standard "
        "errors over windows; for a mean over heads the mean of the heads' errors, an upper bound"
    )


def _summary_row(heads: tables.Rows) -> list[float]:
    """Statistics over all heads of all layers."""
    lives = [row["half_life"] for row in heads if math.isfinite(row["half_life"])]
    longest = [row for row in heads if lives and row["half_life"] == max(lives)]
    rates = [row["rotation"] for row in heads if math.isfinite(row["rotation"])]
    return [
        max(row["largest"] for row in heads),
        *_mean_and_error(heads, "first_token_share"),
        *_mean_and_error(heads, "kurtosis"),
        median(lives) if lives else math.nan,
        *_mean_and_error(longest[:1], "half_life"),
        fmean(rates) if rates else math.nan,
    ]


def _mean_and_error(heads: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """The mean over heads, and the mean of the heads' standard errors; NaN of no head."""
    names = name, f"{name}_standard_error"
    mean, error = (fmean(row[column] for row in heads) if heads else math.nan for column in names)
    return mean, error


TABLES = (
    tables.TaskTable(
        name="attention",
        row=_Row,
        title="Mixing matrices",
        measured_by="--tasks attention",
        summary=tables.Summary(
            title="Mixing matrices",
            caption=_summary_caption,
            columns=(
                "largest weight",
                "share on the first token",
                "error of share",
                "kurtosis",
                "error of kurtosis",
                "median half-life (tokens)",
                "longest half-life (tokens)",
                "error of longest",
                "rotation rate (fixed = 1)",
            ),
            rows=lambda of_runs: [_summary_row(rows) for rows in of_runs],
        ),
    ),
)

LONGEST = 1024
"""Most tokens of a window; mixing matrices have that many rows and columns."""
WINDOWS = 8
"""Most windows that are read."""


class HeadReport(NamedTuple):
    """Statistics of one mixing matrix, from absolute weights in the last half of its rows."""

    layer: int
    matrix: int
    """Index within the layer: its head, or its channel if every channel has a matrix."""
    largest: float
    """Largest weight."""
    first_token_share: float
    """Share of the weight that is on the first token, mean over tokens."""
    kurtosis: float
    """Fourth moment over the square of the second, both about the mean: 3 for a Gaussian."""
    half_life: float
    """Tokens after which the mean log gate has halved a memory; inf without decay."""
    half_life_low: float
    """The same of a gate that is stronger than all but a tenth of the tokens' gates."""
    half_life_high: float
    """The same of a gate that is weaker than all but a tenth. Gates that depend on the text may
    keep nearly everything at most tokens and forget at few."""
    rotation: float
    """Mean of beta, the rate of rotation relative to a fixed one (1); NaN without rotation."""
    rotation_spread: float
    """Standard deviation of beta over the text."""


def weight_statistics(weights: Shaped[Tensor, "T T"]) -> tuple[float, float, float]:
    """Largest weight, share on the first token, and kurtosis, in the last half of the rows.

    The first rows have so few earlier tokens that all their weights are large.
    """
    sizes = weights.abs().double().tril()[weights.shape[0] // 2 :]
    least = torch.finfo(torch.float64).tiny
    past = sizes[torch.ones_like(weights, dtype=torch.bool).tril()[weights.shape[0] // 2 :]]
    share = (sizes[:, 0] / sizes.sum(dim=1).clamp_min(least)).mean().item()
    centred = past - past.mean()
    spread = centred.square().mean().square().clamp_min(least)
    return past.max().item(), share, ((centred**4).mean() / spread).item()


def half_lives(log_g: Float[Tensor, "T *parts"]) -> tuple[float, float, float]:
    """Tokens after which half of a memory is left by gates of the mean log gate, and by those of
    its tenth and ninetieth percentile."""
    # Without the first token: nothing precedes it, and there a softmax over keys has gate zero.
    gates = log_g[1:].double().flatten()
    low, high = gates.quantile(gates.new_tensor([0.1, 0.9])).tolist()
    return _half_life(gates.mean().item()), _half_life(low), _half_life(high)


def _half_life(log_g: float) -> float:
    return math.inf if log_g == 0 else math.log(0.5) / log_g


def _harmonic_mean(values: Sequence[float]) -> float:
    """Of values of which some may be 0 or infinite."""
    if 0 in values:
        return 0.0
    rate = fmean(1 / value for value in values)
    return 1 / rate if rate else math.inf


def over_windows(reports: Sequence[HeadReport]) -> HeadReport:
    """The report of one matrix over windows of equal length, from those of each window."""
    first = reports[0]
    rotations = [report.rotation for report in reports]
    spreads = [report.rotation_spread**2 for report in reports]
    return HeadReport(
        first.layer,
        first.matrix,
        largest=max(report.largest for report in reports),
        first_token_share=fmean(report.first_token_share for report in reports),
        kurtosis=fmean(report.kurtosis for report in reports),
        # As log gates are averaged.
        half_life=_harmonic_mean([report.half_life for report in reports]),
        half_life_low=_harmonic_mean([report.half_life_low for report in reports]),
        half_life_high=_harmonic_mean([report.half_life_high for report in reports]),
        rotation=fmean(rotations),
        rotation_spread=math.sqrt(fmean(spreads) + pvariance(rotations)),
    )


@torch.no_grad()
def attention_inputs(
    model: LanguageModel, tokens: Int[Tensor, "1 T"]
) -> list[Float[Tensor, "1 T D"]]:
    """The input of each layer's attention."""
    inputs: list[Tensor] = []
    handles = [
        cast(Block, block).attention_norm.register_forward_hook(
            lambda module, given, out: inputs.append(out)
        )
        for block in model.blocks
    ]
    try:
        model.activations(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


@torch.no_grad()
def report_layer(
    attention: Attention, x: Float[Tensor, "1 T D"], layer: int
) -> tuple[list[HeadReport], Shaped[Tensor, "W T T"]]:
    """Statistics of every mixing matrix of a layer, and the matrices."""
    weights = attention.weights(x)[0]
    gates = attention.log_gates(x)
    rate = getattr(attention, "rate", None)
    beta = None if rate is None else rate(x)[0].double()
    fixed = math.nan if attention.rotary is None else 1.0
    lives = [(math.inf, math.inf, math.inf)] * attention.num_heads
    if gates is not None:
        lives = [half_lives(log_g) for log_g in gates[0].unbind(dim=1)]  # (T) or (T, parts)
    reports = [
        HeadReport(
            layer,
            head,
            *weight_statistics(matrix),
            # If each channel has a matrix, all matrices of a head share its gate.
            *lives[head * attention.num_heads // len(weights)],
            rotation=fixed if beta is None else beta.mean().item(),
            rotation_spread=0.0 if beta is None else beta.std().item(),
        )
        for head, matrix in enumerate(weights)
    ]
    return reports, weights


@torch.no_grad()
def check(trained: TrainedModel, options: Options) -> None:
    read_windows(trained, options, min(trained.config.data.context, LONGEST))
    some = torch.tensor([2 * [trained.corpus.bos_id]], device=trained.device)  # (1, 2)
    # Not every kind writes out its matrices.
    for layer, x in enumerate(attention_inputs(trained.model, some)):
        cast(Block, trained.model.blocks[layer]).attention.weights(x)


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    context = min(trained.config.data.context, LONGEST)
    batches = read_windows(trained, options, context)
    windows = (
        batch["input"][row : row + 1, longest_document(batch, row)]
        for batch in batches
        for row, index in enumerate(batch["index"])
        if index >= 0  # others only fill a batch up
    )
    # By layer and matrix: a report of each window.
    found: dict[tuple[int, int], list[HeadReport]] = defaultdict(list)
    maps: list[Tensor] = []  # of the first window
    for at, window in enumerate(itertools.islice(windows, WINDOWS)):
        inputs = attention_inputs(trained.model, window.to(trained.device))
        for layer, x in enumerate(inputs):
            attention = cast(Block, trained.model.blocks[layer]).attention
            of_layer, weights = report_layer(attention, x, layer)
            for report in of_layer:
                found[layer, report.matrix].append(report)
            if at == 0:
                maps.append(weights.abs().mean(dim=0).float().cpu())
    reports = [over_windows(some) for some in found.values()]
    table, picture = folder / "attention.csv", folder / "attention.png"
    files = [table, picture]
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        errors = ("first_token_share", "kurtosis", "half_life")
        names = [f"{name}_standard_error" for name in errors]
        writer.writerow([*HeadReport._fields, *names, "windows"])
        for report, some in zip(reports, found.values(), strict=True):
            numbers = [*report[2:], *(_error(some, name) for name in errors)]
            cells = [f"{value:.6g}" for value in numbers]
            writer.writerow([report.layer, report.matrix, *cells, len(some)])
    title = f"{trained.config.name}, {label(trained, options)}"
    draw_maps(picture, maps, title)
    # A kind may neither forget nor choose its rotation.
    if any(math.isfinite(r.half_life) or r.rotation_spread > 0 for r in reports):
        files.append(folder / "attention_memory.png")
        draw_memory(files[-1], reports, title, context)
    prefix = metric_prefix(trained, options)
    values = {
        f"{prefix}/attention_largest": max(report.largest for report in reports),
        f"{prefix}/attention_first_token_share": _mean([r.first_token_share for r in reports]),
        f"{prefix}/attention_kurtosis": _mean([r.kurtosis for r in reports]),
    }
    lives = [report.half_life for report in reports if math.isfinite(report.half_life)]
    if lives:
        values[f"{prefix}/attention_longest_half_life"] = max(lives)
    return TaskResult(values, tuple(files))


def draw_maps(path: Path, maps: list[Float[Tensor, "T T"]], title: str) -> None:
    """PNG of each layer's absolute weights, mean over heads, on a logarithmic scale."""
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    T = maps[0].shape[0]
    # All layers are one picture, in rows of up to four, with some space between them.
    space = max(1, T // 8)
    pitch = T + space
    canvas = torch.full((rows * pitch - space, columns * pitch - space), math.nan)
    with figures.figure(path, title, width=1.6 + 1.35 * columns, height=1 + 1.6 * rows) as axes:
        for layer, weights in enumerate(maps):
            row, column = divmod(layer, columns)
            shown = weights.clamp_min(1e-6).log10()
            shown[torch.ones(T, T, dtype=torch.bool).triu(1)] = math.nan
            top, left = row * pitch, column * pitch
            canvas[top : top + T, left : left + T] = shown
            # In the half that is empty, since no query reads a later key.
            axes.text(left + T, top, f"layer {layer}", ha="right", va="top")
        image = axes.imshow(canvas.numpy(), vmin=-6, vmax=0, cmap="cividis")
        ends = (0, "1"), (T - 1, f"{T:,}")
        for count, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
            set_ticks(
                [index * pitch + at for index in range(count) for at, _ in ends],
                [text for _ in range(count) for _, text in ends],
            )
        axes.set_xlabel("key (position of the token that is read)")
        axes.set_ylabel("query (position)")
        axes.figure.colorbar(image, ax=axes, shrink=0.7, label="log10 of the weight, mean of heads")


def draw_memory(path: Path, reports: list[HeadReport], title: str, context: int) -> None:
    """PNG of every head's half-life, and of its layer's rotation rate."""
    with figures.figure(path, title) as axes:
        gated = [report for report in reports if math.isfinite(report.half_life)]
        lives = [report.half_life for report in gated]
        axes.plot(
            [r.layer for r in gated], lives, "o", color=figures.BLUE, label="half-life of a head"
        )
        axes.axhline(context, color="black", linestyle=":", label="length of the text")
        axes.set_yscale("log", base=2)
        axes.set_xticks(sorted({report.layer for report in reports}))
        axes.set_xlabel("layer")
        axes.set_ylabel("half-life (tokens)")
        rotation_axes = axes.twinx()
        rotation_axes.spines["top"].set_visible(False)
        layers = {report.layer: report for report in reports if not math.isnan(report.rotation)}
        rotation_axes.errorbar(
            [layer + 0.2 for layer in layers],  # beside the half-lives
            [report.rotation for report in layers.values()],
            [report.rotation_spread for report in layers.values()],
            fmt="s",
            color=figures.ORANGE,
            label="rotation rate β",
        )
        rotation_axes.set_ylim(-0.05, 2.05)
        rotation_axes.set_ylabel("rotation rate β (fixed = 1)")
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _error(reports: Sequence[HeadReport], name: str) -> float:
    """The standard error over windows; NaN of one, and of infinite half-lives."""
    values = [getattr(report, name) for report in reports]
    return figures.standard_error(values) if all(map(math.isfinite, values)) else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
