"""The argument of the hooks that run after an update: validate, save, stop and others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning.pytorch import Trainer

from longhaul.configs import RunConfig
from longhaul.modules.pretraining import Pretraining, Update
from longhaul.modules.progress import Progress, is_passed
from longhaul.pipeline.training.recorder import RankReport


@dataclass(frozen=True, kw_only=True)
class AfterUpdate:
    """An update that has been made, and what the ranks report of it, the same on all ranks."""

    config: RunConfig
    trainer: Trainer
    module: Pretraining
    update: Update
    ranks: Sequence[RankReport]
    set_activity: Callable[[str], None]  # tells the watchdog what this rank does from now on

    @property
    def progress(self) -> Progress:
        return self.module.progress

    @property
    def is_last(self) -> bool:
        return self.progress.step >= self.config.num_updates

    @property
    def wants_stop(self) -> bool:
        return any(rank.wants_stop for rank in self.ranks)

    @property
    def wants_save(self) -> bool:
        return any(rank.wants_save for rank in self.ranks)

    @property
    def evaluation_is_due(self) -> bool:
        evaluation = self.config.evaluation
        return bool(evaluation.tasks) and self.is_due(evaluation.every_tokens)

    def is_due(self, every_tokens: int) -> bool:
        """Whether an action is due that happens every so many tokens and after the last update."""
        every = updates_of(self.config, every_tokens)
        return self.is_last or is_passed(every, self.progress.step, self.update.steps)


Hook = Callable[[AfterUpdate], None]


def updates_of(config: RunConfig, tokens: int) -> int:
    """Number of updates in so many tokens, 1 or more."""
    return max(1, tokens // config.optim.tokens_per_update)
