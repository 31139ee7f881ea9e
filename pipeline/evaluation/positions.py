"""Loss at every position of the context."""

import csv
from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from longhaul.modules.language_model import LanguageModel


class PositionLoss(Metric):
    """Mean cross-entropy at each of T positions, nats; sums in float64, exact across ranks."""

    full_state_update = False
    loss_sum: Float64[Tensor, "T"]
    square_sum: Float64[Tensor, "T"]
    samples: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
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

    def compute(self) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"]]:
        """Mean loss at each position over the samples of all ranks, and its standard error."""
        mean = self.loss_sum / self.samples
        variance = (self.square_sum / self.samples - mean.square()).clamp_min(0)
        return mean, (variance / (self.samples - 1).clamp_min(1)).sqrt()


@torch.no_grad()
def measure_positions(
    model: LanguageModel,
    batches: Iterable[dict[str, Tensor]],
    context: int,
    device: torch.device,
    precision: str,
) -> PositionLoss:
    """Loss of each position over validation batches; padding samples (index -1) do not count."""
    metric = PositionLoss(context).to(device)
    was_training = model.training
    model.eval()
    for batch in batches:
        # Padding as well: ranks that share a model's parameters must read it equally often.
        tokens = batch["input"].to(device, non_blocking=True)
        target = batch["target"].to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            losses, _ = model.token_losses(tokens, target)
        metric.update(losses[batch["index"].to(device) >= 0])
    model.train(was_training)
    return metric


def summarise(mean: Float64[Tensor, "T"], prefix: str) -> dict[str, float]:
    """The whole loss, and the loss at positions 1, 2, 4, ... by the names of metrics."""
    values = {f"{prefix}/loss": mean.mean().item()}
    position = 1
    while position <= len(mean):
        values[f"{prefix}/loss_at_{position:06d}"] = mean[position - 1].item()
        position *= 2
    return values


def write_table(path: Path, metric: PositionLoss) -> None:
    """CSV with a row for each position, counted from 1."""
    mean, error = (values.tolist() for values in metric.compute())
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["position", "loss_nats", "standard_error", "samples"])
        for position, (loss, spread) in enumerate(zip(mean, error, strict=True), start=1):
            writer.writerow([position, f"{loss:.6f}", f"{spread:.6f}", int(metric.samples)])


def draw(path: Path, metric: PositionLoss, title: str, baseline: float | None = None) -> None:
    """PNG of the loss against position, with a band of two standard errors.

    Single positions are noisy at small sample counts, so the line is the mean over windows that
    grow with the position (an eighth of it); the band is that of single positions.
    """
    import matplotlib  # here, since it takes half a second that no other command should pay

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean, error = (values.cpu() for values in metric.compute())
    positions = torch.arange(1, len(mean) + 1)
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    low, high = mean - 2 * error, mean + 2 * error
    axes.fill_between(positions, low, high, color="#0072B2", alpha=0.15, linewidth=0)
    axes.plot(positions, mean, color="#0072B2", alpha=0.35, linewidth=0.7, label="each position")
    axes.plot(positions, _smooth(mean), color="#0072B2", linewidth=2, label="running mean")
    if baseline is not None:
        axes.axhline(baseline, color="#D55E00", linestyle="--", label="bigram model")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the context (tokens)")
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _smooth(mean: Float64[Tensor, "T"]) -> Float64[Tensor, "T"]:
    sums = torch.cat([mean.new_zeros(1), mean.cumsum(0)])
    centre = torch.arange(len(mean))
    half = centre // 16
    low, high = (centre - half).clamp_min(0), (centre + half + 1).clamp_max(len(mean))
    return (sums[high] - sums[low]) / (high - low)
