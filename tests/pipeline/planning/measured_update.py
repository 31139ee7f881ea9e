"""Peak memory of real updates: `measured_update.py STRATEGIES RANK STORE CONFIG key=value ...`.

Prints, for each of the comma-separated strategies, bytes of resident memory at the peak of training
less those just before the model is built.
It knows nothing of the plan that it is compared with.
"""

import ctypes
import gc
import math
import re
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from longhaul.configs import RunConfig, load_run_config
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline.distributed.blocks import prepare_blocks, shard


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Loss(nn.Module):
    """What DDP wraps must have its loss for forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, target: torch.Tensor, is_first: torch.Tensor
    ) -> torch.Tensor:
        return self.model.loss(tokens, target, is_first=is_first)


def train(config: RunConfig, strategy: str, updates: int) -> None:
    module = Pretraining(
        config.model,
        config.optim,
        accumulation=config.accumulation,
        samples_per_update=config.samples_per_update,
        max_tokens=config.trainer.max_tokens,
    )
    model, loss = module.model, Loss(module.model)
    mode = config.trainer.activation_checkpointing
    prepare_blocks(model, checkpointing=mode, compiled=False)
    if strategy == "fsdp":
        shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy())
    if strategy == "ddp":
        loss = DistributedDataParallel(loss, gradient_as_bucket_view=True)
    optimizer = module.configure_optimizers()
    for _ in range(updates):
        for micro_batch in range(config.accumulation):
            is_last = micro_batch == config.accumulation - 1
            if strategy == "fsdp":
                model.set_requires_all_reduce(is_last)
            shape = 2, config.trainer.micro_batch, config.data.context
            is_first = torch.rand(shape[1:]) < 0.01
            with loss.no_sync() if strategy == "ddp" and not is_last else nullcontext():
                loss(*torch.randint(256, shape), is_first).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.gradient_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()


def measure(config: RunConfig, small: RunConfig, strategy: str) -> int:
    # Libraries load their code and make their threads where they are first called.
    train(small, strategy, updates=2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    train(config, strategy, updates=2)
    return resident("VmHWM") - before


def main(strategies: str, rank: str, store: str, path: str, *overrides: str) -> None:
    torch.set_num_threads(1)
    config = load_run_config(path, overrides)
    ranks = config.trainer.world_size
    small = ["model.layers=1", "model.width=48", "model.heads=6", "data.context=64"]
    small += [f"optim.tokens_per_update={64 * ranks}", "trainer.micro_batch=1"]
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            rank=int(rank),
            world_size=ranks,
            store=dist.FileStore(store, ranks),
            timeout=timedelta(seconds=60),
        )
    for strategy in strategies.split(","):
        print(measure(config, load_run_config(path, [*overrides, *small]), strategy))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
