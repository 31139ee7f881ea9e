"""Loss at every position of the context."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.figures import (
    BLUE,
    GREEN,
    VERMILLION,
    figure,
    legend_below,
    shown_positions,
    tokens_axis,
    widen,
)
from longhaul.pipeline.evaluation.labels import label, metric_prefix, results_folder
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import Options, TaskResult
from longhaul.pipeline.evaluation.windows import read_losses, read_windows
from longhaul.pipeline.generation.decoding import tokens_at_once
from longhaul.pipeline.runs.trained_model import TrainedModel

_DOTS = 2000
"""Most positions that are drawn; a column is narrower than this many dots."""


class PositionLoss(Metric):
    """Mean cross-entropy at each of T positions, in nats; sums in float64, exact across ranks."""

    full_state_update = False
    loss_sum: Float64[Tensor, "T"]
    square_sum: Float64[Tensor, "T"]
    samples: Tensor

    def __init__(self, context: int, **metric_options: Any) -> None:
        super().__init__(**metric_options)
        zeros = torch.zeros(context, dtype=torch.float64)
        self.add_state("loss_sum", zeros, dist_reduce_fx="sum")
        self.add_state("square_sum", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, "B T"]) -> None:
        """Add the losses of B samples."""
        losses = losses.to(torch.float64)
        self.loss_sum += losses.sum(dim=0)
        self.square_sum += losses.square().sum(dim=0)
        self.samples += losses.shape[0]

    def compute(self) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"], int]:
        """Mean loss at each position over all ranks' samples, standard errors, and sample count."""
        mean = self.loss_sum / self.samples
        variance = (self.square_sum / self.samples - mean.square()).clamp_min(0)
        return mean, (variance / (self.samples - 1).clamp_min(1)).sqrt(), int(self.samples)

    def by_position(self) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"], int]:
        """Like `compute`, but always with shape (T,): for T = 1 Metric drops the dimension."""
        mean, error, samples = self.compute()
        return mean.view(-1), error.view(-1), samples


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
) -> PositionLoss:
    """Loss at each position over validation batches; padding samples (index -1) do not count.

    `at_once` and `progress` are those of `read_losses`. With `is_shared` the metric's `compute` is
    over the samples of all ranks, otherwise over those of this rank.
    """
    metric = PositionLoss(context, sync_on_compute=is_shared).to(device)
    was_training = model.training
    model.eval()
    for batch in batches:
        # Padding is read as well: ranks with sharded parameters must call the model equally often.
        tokens = batch["input"].to(device, non_blocking=True)
        target = batch["target"].to(device, non_blocking=True)
        losses = read_losses(model, tokens, target, precision, at_once, progress)
        metric.update(losses[batch["index"].to(device) >= 0])
    model.train(was_training)
    return metric


def summarise(mean: Float64[Tensor, "T"], prefix: str) -> dict[str, float]:
    """The mean loss, and the loss at positions 1, 2, 4, ..., by metric names."""
    at = {f"{prefix}/loss_at_{p:06d}": mean[p - 1].item() for p in _powers(len(mean))}
    return {f"{prefix}/loss": mean.mean().item(), **at}


def average_prefixes(mean: Float64[Tensor, "T"], prefix: str) -> dict[str, float]:
    """The mean losses of positions 1 to 1, 1 to 2, 1 to 4, ..., by metric names."""
    return {f"{prefix}/loss_up_to_{p:06d}": mean[:p].mean().item() for p in _powers(len(mean))}


def write_table(path: Path, metric: PositionLoss) -> None:
    """CSV with a row for each position, counted from 1."""
    mean, error, samples = metric.by_position()
    columns = [column.cpu() for column in (mean, _mean_up_to_here(mean), error)]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["position", "loss_nats", "mean_up_to_here", "standard_error", "samples"])
        # Row by row, since lists of a million floats would take more memory than the model.
        for position in range(len(mean)):
            row = [f"{column[position].item():.6f}" for column in columns]
            writer.writerow([position + 1, *row, samples])


def draw(
    path: Path, metric: PositionLoss, title: str, *, trained_at: int, baseline: float | None
) -> None:
    """PNG of the loss against position, with a band of two standard errors over documents.

    Single positions are noisy with few samples, so the line is a mean over windows whose width is
    an eighth of the position. The band belongs to single positions. Dots are means over all
    positions up to theirs.
    """
    mean, error = (values.cpu() for values in metric.by_position()[:2])
    shown = shown_positions(len(mean), _DOTS)
    positions = (shown + 1).tolist()
    with figure(path, title) as axes:
        low, high = (mean - 2 * error)[shown].tolist(), (mean + 2 * error)[shown].tolist()
        axes.fill_between(positions, low, high, color=BLUE, alpha=0.15, linewidth=0)
        each = mean[shown].tolist()
        axes.plot(positions, each, color=BLUE, alpha=0.35, linewidth=0.5, label="each position")
        axes.plot(positions, _smooth(mean)[shown].tolist(), color=BLUE, label="running mean")
        powers = _powers(len(mean))
        means = [mean[:p].mean().item() for p in powers]
        axes.plot(powers, means, "o", markersize=3, color=GREEN, label="mean up to here")
        if trained_at < len(mean):
            axes.axvline(trained_at, color="black", linestyle=":", label="training context")
        if baseline is not None:
            axes.axhline(baseline, color=VERMILLION, linestyle="--", label="bigram model")
        tokens_axis(axes, "position in the context (tokens)")
        axes.set_ylabel("loss (nats per token)")
        widen(axes)
        legend_below(axes)


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
            is_shared=trained.ranks.count > 1,
        )
    prefix = metric_prefix(trained, options)
    mean = metric.by_position()[0]
    table, picture = folder / "positions.csv", folder / "positions.png"
    write_table(table, metric)
    draw(
        picture,
        metric,
        f"{config.name}, {label(trained, options)}",
        trained_at=trained.positions.context,
        baseline=Results(results_folder(trained, options), "")
        .values()
        .get(f"{prefix}/bigram_loss"),
    )
    values = summarise(mean, prefix) | average_prefixes(mean, prefix)
    return TaskResult(values, (table, picture))


def _powers(T: int) -> list[int]:
    return [2**k for k in range(T.bit_length())]


def _mean_up_to_here(mean: Float64[Tensor, "T"]) -> Float64[Tensor, "T"]:
    return mean.cumsum(0) / torch.arange(1, len(mean) + 1, device=mean.device)


def _smooth(mean: Float64[Tensor, "T"]) -> Float64[Tensor, "T"]:
    sums = torch.cat([mean.new_zeros(1), mean.cumsum(0)])
    centre = torch.arange(len(mean))
    half = centre // 16
    low, high = (centre - half).clamp_min(0), (centre + half + 1).clamp_max(len(mean))
    return (sums[high] - sums[low]) / (high - low)
