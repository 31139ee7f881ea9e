"""The LightningModule that trains a language model, and the record of its progress."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch.distributed as dist
from jaxtyping import Float, Int
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.modules.optim import OptimConfig, build_optimizer, learning_rate_factor
from longhaul.modules.progress import Progress
from longhaul.modules.skipped_updates import Skip, reason_to_skip

_RECENT_LOSSES = 100


@dataclass(frozen=True)
class Update:
    """Metrics of one update."""

    loss: float  # mean over the update and all ranks, nats per token
    gradient_norm: float  # before clipping
    learning_rate: float
    skip: Skip | None  # set if the update was skipped


class Outcome(NamedTuple):
    """What became of an update."""

    loss: float
    gradient_norm: float  # before clipping; NaN where dropped gradients leave it unknown
    applied: bool  # whether a step was made


@runtime_checkable
class Parallelism(Protocol):
    """What Pretraining needs from the strategy."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. Ranks exchange gradients only after the last one."""

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
            is_good: whether to make a step if the loss is this. None is made either if the norm is
                not finite.

        Returns:
            Loss and norm as numbers, so that the host need not wait for the device once more.
        """


class Pretraining(LightningModule):
    """Next-token training of a LanguageModel. One training_step is one micro-batch.

    Optimisation is manual because an update with a bad gradient must change neither parameters nor
    moments, which Lightning's automatic optimisation cannot ensure.
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
    ) -> None:
        """`train_only` freezes all parameters outside submodules of that name."""
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

    def configure_optimizers(self) -> Optimizer:
        return build_optimizer(self.model, self.optim)

    def training_step(self, batch: dict[str, Int[Tensor, "b T"]], batch_idx: int) -> None:
        self.last_update = None
        is_last = self._micro_step == self.accumulation - 1
        tokens, target = self._own_part(batch["input"]), self._own_part(batch["target"])
        with self._parallelism.accumulating(is_last):
            loss = self.model.loss(tokens, target) / self.accumulation
            self.manual_backward(loss)
        # No zero to begin with: it would have to be copied to the device, which first finishes the
        # whole backward pass.
        own = loss.detach()
        self._loss_sum = own if self._loss_sum is None else self._loss_sum + own
        self._micro_step += 1
        if is_last:
            self.last_update = self._update(self._loss_sum, context=batch["target"].shape[1])
            self._micro_step = 0
            self._loss_sum = None

    def _update(self, loss_sum: Tensor, context: int) -> Update:
        """Make a step unless the loss is bad or the norm not finite, and advance the counters."""
        progress = self.progress
        factor = learning_rate_factor(self.optim.schedule, progress.tokens, self.max_tokens)
        learning_rate = self.optim.learning_rate * factor
        (optimizer,) = self.trainer.optimizers
        for group in optimizer.param_groups:
            group["lr"] = learning_rate

        def reason_of(loss: float) -> str | None:
            return reason_to_skip(loss, progress.recent_losses, self.optim.spike_sigma)

        loss, norm, applied = self._parallelism.update(
            optimizer,
            self.optim.gradient_clip or math.inf,
            _mean_over_ranks(loss_sum),
            lambda loss: reason_of(loss) is None,
        )

        progress.step += 1
        skip: Skip | None = None
        if applied:
            progress.skipped_in_a_row = 0
            progress.recent_losses = [*progress.recent_losses, loss][-_RECENT_LOSSES:]
        else:
            first, after = progress.samples, progress.samples + self.samples_per_update
            skip = Skip(progress.step, first, after - 1, is_spike=reason_of(loss) == "spike")
            progress.skipped.append(skip)
            progress.skipped_in_a_row += 1
        progress.samples += self.samples_per_update
        progress.tokens += self.samples_per_update * context
        return Update(loss, norm, learning_rate, skip)

    def _own_part(self, tokens: Int[Tensor, "b T"]) -> Int[Tensor, "b part"]:
        """This rank's part of sequences that are split over ranks, else the whole sequences."""
        part = self.model.sequence_part
        return tokens if part is None else tokens.chunk(part.count, dim=1)[part.index]

    @property
    def _parallelism(self) -> Parallelism:
        return cast(Parallelism, self.trainer.strategy)


def _mean_over_ranks(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """As the strategy's reduce, but without the barrier before it, for which the device waits."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value
