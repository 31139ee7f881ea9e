"""Loss at each position of the context, in bins of a hundredth of it, and its mean over all
positions up to 1, 2, 4 and so on.
"""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torchmetrics import Metric

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix, results_folder
from longhaul.pipeline.evaluation.options import ContextOptions, TextOptions
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import read_losses, read_windows
from longhaul.pipeline.generation.decoding import tokens_at_once
from longhaul.pipeline.runs.ranks import Ranks
from longhaul.pipeline.runs.trained_model import TrainedModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions, ContextOptions):
    pass


@dataclass(frozen=True)
class _Position:
    position: tables.Positive
    loss_nats: tables.Loss
    standard_error: tables.LossError
    mean_up_to_here: tables.Loss
    standard_error_up_to_here: tables.LossError


@dataclass(frozen=True)
class _Bin:
    first: tables.Positive
    last: tables.Positive
    loss_nats: tables.Loss
    standard_error: tables.LossError


def _bins_curve(rows: tables.Rows) -> tables.Curve:
    found = {
        "position": [(row["first"] + row["last"]) / 2 for row in rows],
        **tables.columns(rows, "first", "last"),
        "window": [rows[-1]["last"]] * len(rows),
        **tables.columns(rows, "standard_error", "loss_nats"),
    }
    return tables.Curve(found, tables.band(found["loss_nats"], found["standard_error"]))


def _bins_caption(of_runs: Sequence[tables.Rows]) -> str:
    widths = sorted({rows[0]["last"] for rows in of_runs})
    return (
        f"Means over {' or '.join(f'{width:,}' for width in widths)} positions each; bands: "
        "standard error over windows."
    )


def _mean_curve(rows: tables.Rows) -> tables.Curve:
    shown = [rows[index] for index in figures.shown_positions(len(rows), _POINTS).tolist()]
    names = ("loss_nats", "standard_error", "standard_error_up_to_here", "mean_up_to_here")
    found = {
        **tables.columns(shown, "position"),
        # Positions of windows with another length are positions in another text.
        "window": [len(rows)] * len(shown),
        **tables.columns(shown, *names),
    }
    return tables.Curve(
        found, tables.band(found["mean_up_to_here"], found["standard_error_up_to_here"])
    )


_MEASURED_BY = (
    "--tasks positions --context N, with N tokens in a window: a divisor of the documents' length, "
    "such as 4 times the training context"
)
TABLES = (
    # Figure 2 of the conformal-sympow paper.
    tables.TaskTable(
        name="loss_in_bins",
        row=_Bin,
        title="Loss at a position",
        measured_by=_MEASURED_BY,
        charts=[
            tables.Chart(
                name="loss_at_position",
                curve=_bins_curve,
                caption=_bins_caption,
                x_label="position in the context (tokens)",
                y_label="loss (nats per token)",
                x_axis="position",
            )
        ],
    ),
    # The mean over all that a document of each length has.
    tables.TaskTable(
        name="positions",
        row=_Position,
        title="Mean loss up to a position",
        measured_by=_MEASURED_BY,
        charts=[
            tables.Chart(
                name="loss_up_to_position",
                curve=_mean_curve,
                caption=lambda of_runs: (
                    "Mean over all positions up to x; bands: standard error over windows."
                ),
                x_label="position in the context (tokens)",
                y_label="mean loss (nats per token)",
                has_ticks=False,
            )
        ],
    ),
)

_POINTS = 300
"""Most points of a curve in a report; a column has no room for more."""

_DOTS = 2000
"""Most positions that are drawn; a column is narrower than this many dots."""


def bin_width(T: int) -> int:
    """Positions that are averaged where the loss at a position is drawn: a hundredth of T.

    At 65,536 tokens these are the 655 by which the points of the conformal-sympow paper's figure 2
    are apart. The article does not say how many positions each of its points covers. Its first one
    (3.9 nats at position 20, 2.4 at 675) cannot be a mean of 655. A bin here holds every position
    up to the next, which has the least noise.
    """
    return max(1, T // 100)


class PositionLoss(Metric):
    """Mean cross-entropy at each of T positions, up to each, and in N bins of them, in nats.

    Standard errors are over samples, which are windows. Those of one document are correlated, so
    where windows are shorter than texts, the errors are too small. Sums are float64, exact
    across ranks.
    """

    full_state_update = False
    sums: Float64[Tensor, "2*T+N"]
    square_sums: Float64[Tensor, "2*T+N"]
    samples: Tensor

    def __init__(self, context: int, **metric_options: Any) -> None:
        super().__init__(**metric_options)
        self.context = context
        self.bin_width = bin_width(context)
        zeros = torch.zeros(2 * context + -(-context // self.bin_width), dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        self.add_state("square_sums", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, "B T"]) -> None:
        """Add the losses of B samples."""
        losses = losses.to(torch.float64)
        up_to = losses.cumsum(1) / torch.arange(1, self.context + 1, device=losses.device)
        bins = [one.mean(1, keepdim=True) for one in losses.split(self.bin_width, dim=1)]
        values = torch.cat([losses, up_to, *bins], dim=1)  # (B, 2 T + N)
        self.sums += values.sum(dim=0)
        self.square_sums += values.square().sum(dim=0)
        self.samples += losses.shape[0]

    def add_up(self, ranks: Ranks) -> None:
        """Make this the metric of all ranks' samples, on each of them.

        Not as torchmetrics does it, among all ranks of a training: one that fails before would be
        waited for.
        """
        states = "sums", "square_sums", "samples"
        own = tuple(getattr(self, state).cpu() for state in states)
        for state, of_all in zip(states, zip(*ranks.gather([own]), strict=True), strict=True):
            setattr(self, state, torch.stack(of_all).sum(dim=0).to(self.device))

    def compute(self) -> tuple[Float64[Tensor, "2*T+N"], Float64[Tensor, "2*T+N"], int]:
        """Means over all ranks' samples, their standard errors (NaN for one), and the count."""
        mean = self.sums / self.samples
        variance = (self.square_sums / self.samples - mean.square()).clamp_min(0)
        error = (variance / (self.samples - 1)).sqrt() if self.samples > 1 else mean * math.nan
        return mean, error, int(self.samples)

    def by_position(self) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"]]:
        """The mean loss at each position, and its standard error."""
        return self._part(0, self.context)

    def up_to_position(self) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"]]:
        """The mean loss of each position and all before it, and its standard error."""
        return self._part(self.context, 2 * self.context)

    def in_bins(self) -> tuple[Float64[Tensor, "N"], Float64[Tensor, "N"]]:
        """The mean loss of each `bin_width` positions, and its standard error."""
        return self._part(2 * self.context, None)

    def _part(self, first: int, end: int | None) -> tuple[Tensor, Tensor]:
        mean, error, _ = self.compute()
        return mean[first:end].cpu(), error[first:end].cpu()


class SourceLoss(Metric):
    """Mean cross-entropy of the samples of each source, in nats; sums are float64."""

    full_state_update = False
    sums: Float64[Tensor, "2 sources"]

    def __init__(self, num_sources: int, **metric_options: Any) -> None:
        super().__init__(**metric_options)
        zeros = torch.zeros(2, num_sources, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, "B T"], source: Int[Tensor, "B"]) -> None:
        """Add the losses of B samples, and the index of each one's source."""
        is_own = torch.nn.functional.one_hot(source, self.sums.shape[1]).double()  # (B, sources)
        means = losses.double().mean(1)
        self.sums += torch.stack([means, torch.ones_like(means)]) @ is_own

    def compute(self) -> Float64[Tensor, "sources"]:
        """The mean of each source over all ranks' samples."""
        return self.sums[0] / self.sums[1]


def measure_positions(
    model: LanguageModel,
    batches: Iterable[dict[str, Tensor]],
    context: int,
    device: torch.device,
    precision: str,
    at_once: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
    *,
    is_shared: bool = True,
    by_source: SourceLoss | None = None,
) -> PositionLoss:
    """Loss at each position over validation batches; padding samples (index -1) do not count.

    `at_once` and `progress` are those of `read_losses`. With `is_shared` the metric's `compute` is
    over the samples of all ranks, otherwise over those of this rank. Where batches tell their
    sources, `by_source` gets the losses too.
    """
    metric = PositionLoss(context, sync_on_compute=is_shared).to(device)
    was_training = model.training
    model.eval()
    for batch in batches:
        # Padding is read as well: ranks with sharded parameters must call the model equally often.
        tokens = batch["input"].to(device, non_blocking=True)
        target = batch["target"].to(device, non_blocking=True)
        is_first = None
        if "is_first" in batch:
            is_first = batch["is_first"].to(device, non_blocking=True)
        losses = read_losses(model, tokens, target, precision, at_once, progress, is_first)
        is_real = batch["index"].to(device) >= 0
        metric.update(losses[is_real])
        if by_source is not None:
            by_source.update(losses[is_real], batch["source"].to(device)[is_real])
    model.train(was_training)
    return metric


def summarise(mean: Float64[Tensor, "T"], prefix: str) -> dict[str, float]:
    """The mean loss, and the loss at positions 1, 2, 4, ..., by metric names."""
    at = {f"{prefix}/loss_at_{p:06d}": mean[p - 1].item() for p in _powers(len(mean))}
    return {f"{prefix}/loss": mean.mean().item(), **at}


def summarise_with_errors(metric: PositionLoss, prefix: str) -> dict[str, float]:
    """The mean loss, and the losses at and up to positions 1, 2, 4, ..., with standard errors."""
    (at, at_error), (up_to, up_to_error) = metric.by_position(), metric.up_to_position()
    values = {"loss": (up_to[-1], up_to_error[-1])}
    values |= {f"loss_at_{p:06d}": (at[p - 1], at_error[p - 1]) for p in _powers(len(at))}
    values |= {f"loss_up_to_{p:06d}": (up_to[p - 1], up_to_error[p - 1]) for p in _powers(len(at))}
    found = {}
    for name, (value, error) in values.items():
        found[f"{prefix}/{name}"] = value.item()
        if error.isfinite():
            found[f"{prefix}/{name}_standard_error"] = error.item()
    return found


def write_table(path: Path, metric: PositionLoss) -> None:
    """CSV with a row for each position, counted from 1."""
    series = [*metric.by_position(), *metric.up_to_position()]
    samples = metric.compute()[2]  # of all ranks, unlike the state of that name
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        names = ["position", "loss_nats", "standard_error", "mean_up_to_here"]
        writer.writerow([*names, "standard_error_up_to_here", "samples"])
        # Row by row, since lists of a million floats would take more memory than the model.
        for position in range(metric.context):
            row = [f"{column[position].item():.6f}" for column in series]
            writer.writerow([position + 1, *row, samples])


def write_bins(path: Path, metric: PositionLoss) -> None:
    """CSV with a row for each bin of positions, which are counted from 1."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "last", "loss_nats", "standard_error", "samples"])
        for (first, last), loss, error in zip(_bins(metric), *metric.in_bins(), strict=True):
            row = [f"{loss.item():.6f}", f"{error.item():.6f}"]
            writer.writerow([first, last, *row, metric.compute()[2]])


def draw(
    path: Path, metric: PositionLoss, title: str, *, trained_at: int, baseline: float | None
) -> None:
    """PNG of the loss at each position, and of the mean loss up to positions 1, 2, 4, ...

    Bars are two standard errors over windows long, to each side.
    """
    with figures.figure(path, title) as axes:
        shown = figures.shown_positions(metric.context, _DOTS)
        each = metric.by_position()[0][shown].tolist()
        axes.plot(
            (shown + 1).tolist(),
            each,
            color=figures.SKY,
            linewidth=0.5,
            label="at the position",
            zorder=1,
        )
        powers = _powers(metric.context)
        up_to, errors = ([part[p - 1].item() for p in powers] for part in metric.up_to_position())
        bars = [2 * error for error in errors]
        axes.errorbar(
            powers, up_to, bars, fmt="o-", markersize=3, color=figures.BLUE, label="mean up to it"
        )
        figures.tokens_axis(axes, "position in the context (tokens)")
        _finish(axes, metric, trained_at, baseline)


def draw_bins(
    path: Path, metric: PositionLoss, title: str, *, trained_at: int, baseline: float | None
) -> None:
    """PNG of the loss at a position, in bins of positions, with two standard errors as a band."""
    means, errors = (part.tolist() for part in metric.in_bins())
    pairs = list(zip(means, errors, strict=True))
    middles = [(first + last) / 2 for first, last in _bins(metric)]
    with figures.figure(path, title) as axes:
        low, high = [m - 2 * e for m, e in pairs], [m + 2 * e for m, e in pairs]
        axes.fill_between(middles, low, high, color=figures.BLUE, alpha=0.15, linewidth=0)
        width = metric.bin_width
        label = "at the position" if width == 1 else f"at the position, mean of {width:,}"
        axes.plot(middles, means, color=figures.BLUE, label=label)
        figures.positions_axis(axes, "position in the context (tokens)")
        _finish(axes, metric, trained_at, baseline)


def _finish(axes: "Axes", metric: PositionLoss, trained_at: int, baseline: float | None) -> None:
    """The lines, labels and legend that both pictures have."""
    if trained_at < metric.context:
        axes.axvline(trained_at, color="black", linestyle=":", label="training context")
    if baseline is not None:
        axes.axhline(baseline, color=figures.VERMILLION, linestyle="--", label="bigram model")
    axes.set_ylabel("loss (nats per token)")
    figures.widen(axes)
    figures.legend_below(axes)


def check(trained: TrainedModel, options: Options) -> None:
    read_windows(trained, options, trained.config.data.context)


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    config = trained.config
    context = config.data.context
    batches = read_windows(trained, options, context)
    work = len(batches) * config.trainer.micro_batch * context
    with trained.ranks.progress(work, "positions") as progress:
        metric = measure_positions(
            trained.model,
            trained.ranks.share(batches),
            context,
            trained.device,
            config.trainer.precision,
            tokens_at_once(trained.model, context),
            progress.add,
            is_shared=False,
        )
    metric.add_up(trained.ranks)
    prefix = metric_prefix(trained, options)
    names = ("positions.csv", "loss_in_bins.csv", "positions.png", "loss_in_bins.png")
    files = tuple(folder / name for name in names)
    table, bins, picture, picture_of_bins = files
    write_table(table, metric)
    write_bins(bins, metric)
    title = f"{config.name}, {label(trained, options)}"
    earlier = Results(results_folder(trained, options), "").values()
    for path, draw_it in ((picture, draw), (picture_of_bins, draw_bins)):
        draw_it(
            path,
            metric,
            title,
            trained_at=trained.positions.context,
            baseline=earlier.get(f"{prefix}/bigram_loss"),
        )
    return TaskResult(summarise_with_errors(metric, prefix), files)


def _powers(T: int) -> list[int]:
    return [2**k for k in range(T.bit_length())]


def _bins(metric: PositionLoss) -> list[tuple[int, int]]:
    """The first and the last position of each bin, counted from 1."""
    starts = range(0, metric.context, metric.bin_width)
    return [(start + 1, min(start + metric.bin_width, metric.context)) for start in starts]
