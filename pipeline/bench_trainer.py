"""What the trainer costs beside a bare PyTorch loop, measured in turns."""

import contextlib
import dataclasses
import gc
import io
import itertools
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import ConfigError, RunConfig
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline import bench_checkpoints, train
from longhaul.pipeline.bare_loop import BareLoop, now

_WARM_UP = 4  # updates at the start of every round, not counted
_UPDATES = 10
_ROUNDS = 5
_NEVER = 1 << 60  # tokens


def run(config: RunConfig) -> None:
    """Print the overhead of the trainer and the cost of checkpoints, for one process.

    Raises:
        ConfigError: a config of several ranks.
    """
    if config.trainer.strategy != "single":
        raise ConfigError(
            f"trainer.strategy: found {config.trainer.strategy}, wanted single, for which the "
            "trainer is compared with a bare loop"
        )
    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    # On the disk where runs are: checkpoints are written to it.
    with tempfile.TemporaryDirectory(dir=root, prefix=".bench-") as folder:
        config = _undisturbed(config, Path(folder))
        print(_overhead(config), flush=True)
        print(f"\n{bench_checkpoints.table(config)}", flush=True)


def _undisturbed(config: RunConfig, folder: Path) -> RunConfig:
    """Nothing but updates, but for a checkpoint after the last one."""
    tokens = config.optim.tokens_per_update * (_WARM_UP + _UPDATES)
    return dataclasses.replace(
        config,
        root=str(folder),
        data=dataclasses.replace(config.data, validation_manifest=None),
        trainer=dataclasses.replace(config.trainer, max_tokens=tokens, start_from=None),
        checkpoint=dataclasses.replace(config.checkpoint, every_tokens=_NEVER),
        tracking=dataclasses.replace(config.tracking, uri=f"sqlite:///{folder}/mlflow.db"),
    )


class _Stamps(Callback):
    """The clock, and the processor time of all threads, after each update of a round."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self._processors: list[float] = []
        self.loss = math.nan

    def stamp(self, device: torch.device) -> None:
        self.walls.append(now(device))
        self._processors.append(time.process_time())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Pretraining)
        if pl_module.last_update is not None:
            self.loss = pl_module.last_update.loss
            self.stamp(pl_module.device)

    @property
    def seconds(self) -> list[float]:
        """Of each counted update."""
        counted = self.walls[_WARM_UP - 1 : _WARM_UP + _UPDATES]
        return [after - before for before, after in itertools.pairwise(counted)]

    @property
    def processor_seconds(self) -> float:
        """Of a counted update, all threads together."""
        counted = self._processors[_WARM_UP - 1 : _WARM_UP + _UPDATES]
        return (counted[-1] - counted[0]) / _UPDATES


def _overhead(config: RunConfig) -> str:
    ours: list[_Stamps] = []
    bare: list[_Stamps] = []
    for number in range(_ROUNDS + 1):
        # Each goes first as often as the other: a machine may get slower as it warms up.
        for is_ours in (number % 2 == 0, number % 2 == 1):
            if is_ours:
                ours.append(_train(dataclasses.replace(config, name=f"round-{number}")))
            else:
                bare.append(_loop(config))
            gc.collect()  # ends the workers of the loader
        print(f"trainer beside a bare loop: {number} of {_ROUNDS} rounds", flush=True)
    if not abs(ours[0].loss - bare[0].loss) < 1e-3 * abs(bare[0].loss):
        raise RuntimeError(
            f"the trainer's loss is {ours[0].loss}, wanted the bare loop's {bare[0].loss}"
        )
    # The first round also imports MLflow and makes its database.
    del ours[0], bare[0]
    medians = [
        statistics.median(s for stamps in rounds for s in stamps.seconds) for rounds in (ours, bare)
    ]
    best = [min(min(stamps.seconds) for stamps in rounds) for rounds in (ours, bare)]
    # Their mean: MLflow's thread, which also takes some of it, works every two seconds.
    processor = [
        statistics.mean(stamps.processor_seconds for stamps in rounds) for rounds in (ours, bare)
    ]
    return (
        f"Trainer, {_ROUNDS} rounds of {_UPDATES} updates in turns with a bare PyTorch loop:\n\n"
        "| an update takes | Trainer | bare loop | ratio |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {what} | {pair[0] * 1e3:.4g} ms | {pair[1] * 1e3:.4g} ms "
            f"| {pair[0] / pair[1]:.3f} |"
            for what, pair in (
                ("median", medians),
                ("best", best),
                ("processor time, all threads", processor),
            )
        )
    )


def _train(config: RunConfig) -> _Stamps:
    stamps = _Stamps()
    with contextlib.redirect_stdout(io.StringIO()):
        status = train.train(config, stamps)
    if status:
        raise RuntimeError(f"training ended with status {status}, wanted 0")
    # Before the next round, since all of them together would be as large as many models.
    shutil.rmtree(Path(config.root) / config.name)
    return stamps


def _loop(config: RunConfig) -> _Stamps:
    stamps = _Stamps()
    loop = BareLoop(config)
    for _ in range(config.num_updates):
        loop.update()
        stamps.stamp(loop.device)
    stamps.loss = loop.loss.item()
    return stamps
