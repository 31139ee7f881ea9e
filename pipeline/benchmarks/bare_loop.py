"""A minimal training loop in plain PyTorch, with which the trainer is compared."""

import math
import time

import torch
from lightning.pytorch import seed_everything
from torch import nn

from longhaul.configs import RunConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.optim import learning_rate_factor, set_learning_rate
from longhaul.pipeline.training.run import build_module


def synchronized_time(device: torch.device) -> float:
    """The time in seconds after the device has finished all its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class BareLoop:
    """Makes the same updates as `longhaul train` with a config, in one process."""

    def __init__(self, config: RunConfig) -> None:
        seed_everything(config.trainer.seed, verbose=False)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = config
        module = build_module(config)
        self.model = module.model.to(self.device)
        self.optimizer = module.configure_optimizers()
        data = TokenDataModule(
            config.data,
            seed=config.trainer.seed,
            samples_per_update=config.samples_per_update,
            micro_batch=config.trainer.micro_batch,
            rank=0,
            world_size=1,
            pin_memory=torch.cuda.is_available(),
        )
        self._batches = iter(data.train_dataloader())
        self._tokens = 0
        self.loss = torch.zeros(())

    def update(self) -> None:
        config = self.config
        factor = learning_rate_factor(
            config.optim.schedule, self._tokens, config.trainer.max_tokens
        )
        set_learning_rate(self.optimizer, config.optim.learning_rate * factor)
        self.loss = torch.zeros((), device=self.device)
        for _ in range(config.accumulation):
            batch = next(self._batches)
            batch = {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}
            is_half = config.trainer.precision == "bf16-mixed"
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_half):
                loss = self.model.loss(
                    batch["input"],
                    batch["target"],
                    is_first=batch.get("is_first"),
                    z_loss=config.optim.z_loss,
                )
                loss = loss / config.accumulation
            loss.backward()
            self.loss += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.gradient_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._tokens += config.optim.tokens_per_update
