"""The LightningModule that trains a language model: one update, from its batch to the counters.

`Pretraining.training_step` adds the gradients of a micro-batch. After the last one `_update` sets
the learning rate; `Parallelism.update` finds the norm of the gradients, clips them, decides whether
to skip the update, and makes the step; `_update` counts. Under `longhaul train` hooks then do what
is due, which starts with the report of the update (pipeline/training/callback.py).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longhaul.modules.cross_entropy import RowLosses
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.optim import (
    OptimConfig,
    build_optimizer,
    learning_rate_factor,
    set_learning_rate,
)
from longhaul.modules.progress import Progress, Skip, is_passed, reason_to_skip

_RECENT_LOSSES = 100


@dataclass(frozen=True)
class Update:
    """Metrics of one update."""

    loss: float  # cross-entropy, mean over the update and all ranks, nats per token
    gradient_norm: float  # before clipping
    learning_rate: float
    skip: Skip | None  # set if the update was skipped
    steps: int = 1  # that it counts as
    source_losses: tuple[float, ...] = ()  # the mean of each source; NaN where it has no sample
    z_loss: float | None = None  # what was added to the loss, in the mean; None without z-loss


class Outcome(NamedTuple):
    """What became of an update."""

    loss: float
    gradient_norm: float  # before clipping; NaN where dropped gradients leave it unknown
    applied: bool  # whether a step was made


class Parallelism:
    """What Pretraining needs from the strategy.

    By default the optimizer holds the module's own parameters and gradients.
    """

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. Ranks exchange gradients only after the last one."""
        return nullcontext()

    def update(
        self,
        optimizer: Optimizer,
        max_norm: float,
        loss: Float[Tensor, ""],
        is_good: Callable[[float], bool],
    ) -> Outcome:
        """Clip the gradients, make an optimizer step, and clear the gradients.

        Args:
            max_norm: largest global norm of the gradients; infinity for no clipping.
            loss: the update's, the same on all ranks.
            is_good: whether to make a step at this loss. If the norm is not finite, none is made.

        Returns:
            Loss and norm as numbers, so that the host need not wait for the device once more.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        # Read together, so that the host waits for the device once.
        loss_read, norm_read = torch.stack([loss.double(), norm.double()]).tolist()
        # An update whose gradients are not finite is skipped.
        applied = is_good(loss_read) and math.isfinite(norm_read)
        if applied:
            optimizer.step()
        optimizer.zero_grad()
        return Outcome(loss_read, norm_read, applied)


class _Stock(Parallelism):
    """Parallelism under one of Lightning's own strategies."""

    def __init__(self, strategy: Strategy) -> None:
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"strategy: found {type(strategy).__name__}, wanted Lightning's for one device or "
                "DDP, or `longhaul train`, which has the others"
            )
        if getattr(strategy.precision_plugin, "scaler", None) is not None:
            raise ValueError("precision: found 16-mixed, wanted one that scales no loss")
        self._strategy = strategy

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or not isinstance(self._strategy, DDPStrategy):
            return nullcontext()
        return self._strategy.block_backward_sync()


class Pretraining(LightningModule):
    """Next-token training of a LanguageModel. One training_step is one micro-batch.

    Optimisation is manual because an update with a bad gradient must change neither parameters nor
    moments, which Lightning's automatic optimisation cannot ensure.

    It trains under `longhaul train` and in a plain `lightning.Trainer` on one device or with DDP,
    which then also logs `train/loss`, `train/gradient_norm`, `train/learning_rate` and
    `validation/loss`, and keeps `progress` in its checkpoints.
    """

    def __init__(
        self,
        model: LanguageModelConfig,
        optim: OptimConfig,
        *,
        accumulation: int,
        samples_per_update: int,
        max_tokens: int,
        train_only: str | None = None,
        num_sources: int = 0,
    ) -> None:
        """Build the model.

        Args:
            model, optim: what is trained, and how.
            accumulation: micro-batches of a rank per `optim.tokens_per_update`.
            samples_per_update: samples that all ranks together consume in these.
            max_tokens: budget, at which the schedule of the learning rate ends.
            train_only: freezes all parameters outside submodules of that name.
            num_sources: number of sources whose losses are told apart; batches then hold `source`.
        """
        super().__init__()
        self.automatic_optimization = False
        self.model = LanguageModel(model)
        # Before the strategy sees the model, because it checks which parameters need gradients.
        self.model.train_only(train_only)
        self.optim = optim
        self.accumulation = accumulation
        self.samples_per_update = samples_per_update
        self.max_tokens = max_tokens
        self.progress = Progress()
        self.last_update: Update | None = None
        self._micro_step = 0
        self._loss_sum: Tensor | None = None
        self._z_loss_sum: Tensor | None = None
        self._num_sources = num_sources
        self._source_sums: Tensor | None = None  # (2, sources): losses, and tokens
        self._parallelism: Parallelism
        self._is_stock = False

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        own = strategy if isinstance(strategy, Parallelism) else None
        self._is_stock = own is None
        # An interrupted fit may have left half an update.
        self._forget_losses()
        if self._is_stock:
            self.zero_grad()
        self._parallelism = own or _Stock(strategy)
        if self._is_stock and self.optim.on_spike == "rewind":
            raise ValueError("optim.on_spike: found rewind, wanted skip, or `longhaul train`")

    def configure_optimizers(self) -> Optimizer:
        return build_optimizer(self.model, self.optim)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """One micro-batch.

        Args:
            batch: `input` and `target` (B, T), and optionally `is_first` (B, T): which tokens begin
                a document, where rows hold several. All three are of whole sequences. With
                `num_sources`, `source` (B,) is the index of each row's source.
            batch_idx: not read.
        """
        self.last_update = None
        size = self.optim.update_factor(self.progress.tokens)
        micro_batches = size * self.accumulation
        is_last = self._micro_step == micro_batches - 1
        tokens, target = self._own_part(batch["input"]), self._own_part(batch["target"])
        row_losses = RowLosses() if self._num_sources or self.optim.z_loss else None
        with self._parallelism.accumulating(is_last):
            loss = self.model.loss(
                tokens,
                target,
                is_first=batch.get("is_first"),
                row_losses=row_losses,
                z_loss=self.optim.z_loss,
            )
            loss = loss / micro_batches
            self.manual_backward(loss)
        # No zero to begin with: it would have to be copied to the device, which first finishes the
        # whole backward pass.
        own = loss.detach()
        if row_losses is not None and self.optim.z_loss:
            own = row_losses.all().mean() / micro_batches
            z_loss = self.optim.z_loss * row_losses.normalizers().square().mean()
            self._z_loss_sum = _sum(self._z_loss_sum, z_loss / micro_batches)
        self._loss_sum = _sum(self._loss_sum, own)
        if row_losses is not None and self._num_sources:
            self._add_by_source(row_losses.all().view_as(target), batch["source"])
        self._micro_step += 1
        if is_last:
            self.last_update = self._update(self._loss_sum, size)
            self._forget_losses()
            if self._is_stock:
                self._log(self.last_update)
                self.check_skips(self.last_update)

    def _update(self, loss_sum: Tensor, size: int) -> Update:
        """Set the rate, make a step unless the update is bad, and advance the counters.

        `size` is that of the update, in `optim.tokens_per_update`.
        """
        progress = self.progress
        factor = learning_rate_factor(self.optim.schedule, progress.tokens, self.max_tokens)
        learning_rate = self.optim.learning_rate * factor * math.sqrt(size)
        # Lightning's wrapper counts the steps for a plain trainer.
        own: Any = self.optimizers() if self._is_stock else self.trainer.optimizers[0]
        optimizer: Optimizer = own
        set_learning_rate(optimizer, learning_rate)

        def reason_of(loss: float) -> str | None:
            return reason_to_skip(loss, progress.recent_losses, self.optim.spike_sigma)

        loss, norm, applied = self._parallelism.update(
            optimizer,
            self.optim.gradient_clip or math.inf,
            _mean_over_ranks(loss_sum),
            lambda loss: reason_of(loss) is None,
        )

        progress.step += size
        skip: Skip | None = None
        if applied:
            progress.skipped_in_a_row = 0
            progress.recent_losses = [*progress.recent_losses, loss][-_RECENT_LOSSES:]
        else:
            first, after = progress.samples, progress.samples + size * self.samples_per_update
            skip = Skip(progress.step, first, after - 1, is_spike=reason_of(loss) == "spike")
            progress.skipped.append(skip)
            progress.skipped_in_a_row += 1
        progress.samples += size * self.samples_per_update
        progress.tokens += size * self.optim.tokens_per_update
        z_loss = None if self._z_loss_sum is None else _mean_over_ranks(self._z_loss_sum).item()
        return Update(loss, norm, learning_rate, skip, size, self._source_losses(), z_loss)

    def _forget_losses(self) -> None:
        self._micro_step = 0
        self._loss_sum = self._z_loss_sum = self._source_sums = None

    def _add_by_source(self, losses: Float[Tensor, "b T"], source: Int[Tensor, "b"]) -> None:
        """Add losses and tokens of each source, without a wait for the device."""
        numbers = torch.arange(self._num_sources, device=source.device)
        # A product: sums by index are not the same twice on GPUs.
        is_own = (source == numbers[:, None]).double()  # (sources, b)
        own = losses.sum(1, dtype=torch.float64)  # (b,)
        tokens = torch.full_like(own, losses.shape[1])
        sums = torch.stack([own, tokens]) @ is_own.T  # (2, sources)
        self._source_sums = _sum(self._source_sums, sums)

    def _source_losses(self) -> tuple[float, ...]:
        """The mean loss of each source in this update, over all ranks."""
        sums = self._source_sums
        if sums is None:
            return ()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return tuple((sums[0] / sums[1]).tolist())

    def _own_part(self, tokens: Int[Tensor, "b T"]) -> Int[Tensor, "b part"]:
        """This rank's part of sequences that are split over ranks, else the whole sequences."""
        part = self.model.sequence_part
        return tokens if part is None else tokens.chunk(part.count, dim=1)[part.index]

    def check_skips(self, update: Update) -> None:
        """Raise RuntimeError if `optim.max_skipped_updates` in a row were skipped, the last now."""
        found = self.progress.skipped_in_a_row
        if found >= self.optim.max_skipped_updates:
            raise RuntimeError(
                f"loss {update.loss} and gradient norm {update.gradient_norm}: found {found} "
                "updates in a row that had to be skipped, the last at step "
                f"{self.progress.step}, wanted finite ones without a spike; the run cannot go on"
            )

    def _log(self, update: Update) -> None:
        """Hand the metrics to a plain trainer's loggers, by updates: it counts micro-batches."""
        metrics = {
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "train/learning_rate": update.learning_rate,
        }
        if update.z_loss is not None:
            metrics["train/z_loss"] = update.z_loss
        self.log_dict(metrics, logger=False)  # for callbacks
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and is_passed(every, self.progress.step, update.steps):
            for logger in self.loggers:
                logger.log_metrics(metrics, self.progress.step)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        real = batch["index"] >= 0  # The last batches of ranks are filled up.
        size = int(real.sum())
        loss = torch.zeros((), device=self.device)
        if size:
            tokens, target = batch["input"][real], batch["target"][real]
            is_first = batch["is_first"][real] if "is_first" in batch else None
            loss = self.model.loss(tokens, target, is_first=is_first)
        self.log("validation/loss", loss, batch_size=size, sync_dist=True)
        # Loggers take "step" for the step.
        step = float(self.progress.step)
        self.log("step", step, batch_size=1, reduce_fx="max", sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["progress"] = asdict(self.progress)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint["progress"]
        self.progress = Progress(**stored | {"skipped": [Skip(**one) for one in stored["skipped"]]})


def _sum(total: Tensor | None, one: Tensor) -> Tensor:
    return one if total is None else total + one


def _mean_over_ranks(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """As the strategy's reduce, but without the barrier before it, for which the device waits."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value
