"""The base of all strategies: how they are saved and resumed, and how their ranks are started."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypedDict

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longhaul.modules.language_model import LanguageModel
from longhaul.modules.pretraining import Parallelism
from longhaul.pipeline.checkpoints.optimizer_state import restore_training, training_tensors
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.system.waiting import END_RANKS_S, POLL_S


class Resumable(Parallelism):
    """A strategy whose training can be saved, and resumed under any other.

    By default its optimizer holds the module's own parameters and gradients.
    """

    def tensors(self, model: LanguageModel, optimizer: Optimizer) -> dict[str, Tensor]:
        """The tensors that this rank contributes to a checkpoint, by name; not copied."""
        return training_tensors(model, optimizer)

    def whole_weights(self, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each weight as a checkpoint has them, not copied where a rank has all.

        All ranks iterate together: where they shard the model, each step gathers a weight.
        """
        for name, tensor in model.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def restore(self, model: LanguageModel, optimizer: Optimizer, saved: SavedCheckpoint) -> None:
        """Restore tensors that were saved under this or any other strategy."""
        restore_training(model, optimizer, saved)


def resumable(trainer: Trainer) -> Resumable:
    """The trainer's strategy, which `build_strategy` made."""
    assert isinstance(trainer.strategy, Resumable)
    return trainer.strategy


class Connecting(TypedDict):
    process_group_backend: str
    timeout: timedelta


class LaunchesRanks(Strategy):
    """Starts the other ranks of this machine, unless a job scheduler does."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None  # type: ignore[attr-defined]
        environment: ClusterEnvironment = self.cluster_environment  # type: ignore[attr-defined]
        if not environment.creates_processes_externally:
            self._launcher = _Launcher(environment, self.num_processes, self.num_nodes)  # type: ignore[attr-defined]


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, without its thread that kills rank 0 when another rank ends.

    Rank 0 has to record how the run ended, and the watchdog ends ranks that hang.
    """

    _is_ending = False

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()
        threading.Thread(target=self._watch_connecting, name="launcher", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _watch_connecting(self) -> None:
        """End this process with the status of a rank that ends before all ranks are connected.

        Nothing has been written by then, and rank 0 would wait for that rank for half an hour.
        """
        while not dist.is_initialized():
            for process in self.procs:
                status = process.poll()
                if status and not self._is_ending:
                    for other in self.procs:
                        other.kill()
                    os._exit(status if status > 0 else 1)
            time.sleep(POLL_S)

    def end(self) -> None:
        """Wait until the other ranks of this machine have ended, or kill them."""
        self._is_ending = True
        deadline = time.monotonic() + END_RANKS_S
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def end_ranks(trainer: Trainer) -> None:
    """Wait until the ranks that this process started have ended, or kill them."""
    if isinstance(trainer.strategy.launcher, _Launcher):
        trainer.strategy.launcher.end()


def broadcast_weights(model: nn.Module) -> None:
    """Broadcast rank 0's weights, as DDP does.

    With trainer.start_from, ranks may have read different checkpoints of a run in progress.
    """
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
