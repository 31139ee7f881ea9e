"""The cost of the trainer compared with a bare PyTorch loop; both take turns."""

import contextlib
import dataclasses
import io
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import ConfigError, RunConfig
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline.benchmarks import checkpoints
from longhaul.pipeline.benchmarks.bare_loop import BareLoop, synchronized_time
from longhaul.pipeline.training.run import train

_WARM_UP = 4  # updates that are not counted; MLflow is imported during them
_UPDATES = 40
_NEVER = 1 << 60  # tokens


def run(config: RunConfig) -> None:
    """Print the overhead of the trainer and the cost of checkpoints, in one process.

    Raises:
        ConfigError: the config has several ranks.
    """
    if config.trainer.strategy != "single":
        raise ConfigError(
            f"trainer.strategy: found {config.trainer.strategy}, wanted single: the bare loop, "
            "with which the trainer is compared, has one process"
        )
    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    # On the same disk as runs, since checkpoints are written to it.
    with tempfile.TemporaryDirectory(dir=root, prefix=".bench-") as folder:
        config = _only_updates(config, Path(folder))
        print(_overhead(config), flush=True)
        print(f"\n{checkpoints.table(config)}", flush=True)


def _only_updates(config: RunConfig, folder: Path) -> RunConfig:
    """The config with updates only, and one checkpoint after the last update."""
    tokens = config.optim.tokens_per_update * (_WARM_UP + _UPDATES)
    return dataclasses.replace(
        config,
        root=str(folder),
        data=config.data.without_validation(),
        trainer=dataclasses.replace(
            config.trainer, max_tokens=tokens, start_from=None, branch_from=None
        ),
        optim=dataclasses.replace(config.optim, larger_updates=[]),
        checkpoint=dataclasses.replace(config.checkpoint, every_tokens=_NEVER),
        tracking=dataclasses.replace(config.tracking, uri=f"sqlite:///{folder}/mlflow.db"),
    )


class _BesideBareLoop(Callback):
    """Makes an update of the bare loop after each update of the trainer, and times both.

    They take turns so that a machine that gets slower, or has other work, slows both.
    """

    def __init__(self, config: RunConfig) -> None:
        self.ours: list[_Cost] = []
        self.bare: list[_Cost] = []
        self._config = config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loop = BareLoop(self._config)
        self._began = _Cost.so_far(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Pretraining)
        update = pl_module.last_update
        if update is None:
            return
        # The trainer's time includes the end of its previous update, as this is called first.
        ours = _Cost.so_far(pl_module.device)
        self._loop.update()
        bare = _Cost.so_far(pl_module.device)
        self.ours.append(ours - self._began)
        self.bare.append(bare - ours)
        loss = self._loop.loss.item()
        # Only at first, since rounding differences grow later.
        if len(self.ours) <= _WARM_UP and not abs(update.loss - loss) < 1e-3 * abs(loss):
            raise RuntimeError(
                f"the trainer's loss is {update.loss}, wanted the bare loop's {loss}"
            )
        self._began = _Cost.so_far(pl_module.device)


class _Cost(NamedTuple):
    wall: float
    processor: float  # of all threads of this process

    @classmethod
    def so_far(cls, device: torch.device) -> "_Cost":
        return cls(synchronized_time(device), time.process_time())

    def __sub__(self, other: "_Cost") -> "_Cost":
        return _Cost(self.wall - other.wall, self.processor - other.processor)


def _overhead(config: RunConfig) -> str:
    both = _BesideBareLoop(config)
    with contextlib.redirect_stdout(io.StringIO()):
        status = train(config, both)
    if status:
        raise RuntimeError(f"training ended with status {status}, wanted 0")
    # Deleted before checkpoints are measured: both together need the space of many models.
    shutil.rmtree(Path(config.root) / config.name)
    rows = []
    for what, field in (("time", 0), ("processor time, all threads", 1)):
        pairs = [(a[field], b[field]) for a, b in zip(both.ours, both.bare, strict=True)]
        ours, bare = (statistics.median(side) * 1e3 for side in zip(*pairs[_WARM_UP:], strict=True))
        ratio = statistics.median(a / b for a, b in pairs[_WARM_UP:])
        rows.append(f"| {what} | {ours:.4g} ms | {bare:.4g} ms | {ratio:.3f} |")
    return (
        f"Trainer, medians of {_UPDATES} updates that take turns with a bare PyTorch loop's:\n\n"
        "| per update | Trainer | bare loop | median ratio |\n|---|---|---|---|\n" + "\n".join(rows)
    )
