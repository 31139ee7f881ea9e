"""The Lightning strategy for each value of trainer.strategy: single, DDP, FSDP2 or DeepSpeed.

Each is also a `Parallelism` (modules/pretraining.py): it decides when ranks exchange gradients,
and makes the optimizer step, which it skips if the gradient norm is not finite. All of them run on
CPUs over gloo and on GPUs over NCCL.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from longhaul.configs import RunConfig
from longhaul.configs.schema import TrainerConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline.distributed.blocks import shard_as_configured
from longhaul.pipeline.distributed.deepspeed import DeepSpeedZero
from longhaul.pipeline.distributed.launch import collective_timeout
from longhaul.pipeline.distributed.strategy import (
    Connecting,
    LaunchesRanks,
    Resumable,
    broadcast_weights,
)


def build_strategy(config: RunConfig, devices: list[torch.device]) -> Strategy:
    """The strategy that the config names.

    Args:
        config: of the run.
        devices: of the ranks of this machine, by local rank.
    """
    if config.trainer.strategy == "single":
        return Single(devices[0])
    connecting: Connecting = {
        "process_group_backend": "nccl" if devices[0].type == "cuda" else "gloo",
        "timeout": collective_timeout(config.trainer),
    }
    match config.trainer.strategy:
        case "ddp":
            return DDP(
                parallel_devices=devices,
                gradient_as_bucket_view=True,
                # Without it, DDP fills its buckets in another order from the second update of each
                # process on, and a sum over three ranks or more depends on its place in a bucket.
                find_unused_parameters=config.trainer.deterministic,
                **connecting,
            )
        case "fsdp":
            return FSDP2(config.trainer, devices, connecting)
        case _:
            return DeepSpeedZero(config, devices, connecting)


class Single(Resumable, SingleDeviceStrategy):
    """One process."""


class DDP(Resumable, LaunchesRanks, DDPStrategy):
    """Every rank holds the full model. Gradients are all-reduced during the backward pass."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self.block_backward_sync()

    def tensors(self, model: LanguageModel, optimizer: Optimizer) -> dict[str, Tensor]:
        """This rank's share of the tensors, since a save first copies them to main memory."""
        every = super().tensors(model, optimizer)
        return {name: every[name] for name in sorted(every)[self.global_rank :: self.world_size]}


class FSDP2(Resumable, LaunchesRanks, ModelParallelStrategy):
    """Every rank holds a shard of each parameter, of its gradient and of its moments.

    Blocks are gathered one at a time. Each of `replicas` groups of ranks holds a full copy of the
    model.
    """

    def __init__(
        self, config: TrainerConfig, devices: list[torch.device], connecting: Connecting
    ) -> None:
        super().__init__(**connecting)
        self.parallel_devices = devices
        self._config = config

    def setup_environment(self) -> None:
        # Skips the parent's own method, which makes a mesh of its own, with more process groups.
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        # The parent's setup leaves the sharding to a hook of the LightningModule, but Pretraining
        # knows nothing of device meshes.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = cast(Pretraining, self.model)
        broadcast_weights(module.model.to(self.root_device))
        shard_as_configured(module.model, self._config, self.root_device.type)
        self.model_to_device()
        self.barrier()
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        root = cast(FSDPModule, cast(Pretraining, self.model).model)
        # Each micro-batch's gradients are scattered over the shards, since whole ones would need
        # memory for the whole model. Replicas are averaged after the last one.
        root.set_requires_all_reduce(is_last)
        return nullcontext()
