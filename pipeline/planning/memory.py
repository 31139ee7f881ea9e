"""Memory and communication of a rank under each strategy: one update, traced without its numbers.

The real model takes the real step on tensors that have shapes and no data, so that what is counted
is what the code does. DeepSpeed cannot be traced so: its states follow from its documentation.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.optim import build_optimizer
from longhaul.pipeline.planning.memory_tracker import CATEGORIES, MemoryTracker
from longhaul.pipeline.planning.op_workspaces import Backend, OpWorkspace
from longhaul.pipeline.training.blocks import prepare_blocks, shard

# What Lightning's DeepSpeedStrategy sets, in numbers, and DeepSpeed's own default for stage 3.
_DEEPSPEED_BUCKET = 200_000_000
_DEEPSPEED_LIVE = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How a model is spread over the ranks and what it keeps for the backward pass."""

    strategy: str  # single | ddp | fsdp | deepspeed
    stage: int | None = None  # of deepspeed
    checkpointing: int = 0  # every n-th block is recomputed; 0: none

    @property
    def name(self) -> str:
        return self.strategy if self.stage is None else f"{self.strategy} {self.stage}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A rank's bytes where an update needs most, and the bytes that it sends in an update."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # and gradients on their way
    copies: int  # of parameters: gathered, cast to 16 bits; and buffers of collectives
    workspace: int  # inside of an op: logits, states, features
    sent: float

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in CATEGORIES)


class Planner:
    """Plans of one config on devices of one kind; what was traced once is not traced again."""

    def __init__(self, config: RunConfig, backend: Backend = "triton") -> None:
        self._config = config
        self._workspace = OpWorkspace(backend)
        self._traced: dict[tuple[int, int, bool], _Traced] = {}

    def plan(self, choice: MemorySettings, micro_batch: int | None = None) -> Plan:
        """What a rank needs with a choice, and with another micro-batch than the config's."""
        config = self._config
        if micro_batch is not None:
            trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
            config = dataclasses.replace(config, trainer=trainer)
        ranks = config.trainer.world_size
        traced = self._trace(config, choice)
        if choice.strategy == "deepspeed":
            return _deepspeed(config, choice, traced)
        if choice.strategy == "single":
            return Plan(**traced.peak, sent=0.0)
        others = (ranks - 1) / ranks
        if choice.strategy == "ddp":
            # Gradients live in the buckets that are all-reduced (gradient_as_bucket_view), and
            # these are there from the start to the end.
            peak = traced.peak_besides_gradients | {"gradients": traced.gradients}
            return Plan(**peak, sent=2 * others * traced.gradients)
        return Plan(**traced.peak, sent=others * traced.communicated)

    def _trace(self, config: RunConfig, choice: MemorySettings) -> "_Traced":
        is_sharded = choice.strategy == "fsdp"
        key = config.trainer.micro_batch, choice.checkpointing, is_sharded
        if key not in self._traced:
            self._traced[key] = _trace_update(
                config, choice.checkpointing, self._workspace, is_sharded=is_sharded
            )
        return self._traced[key]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """Bytes by part where most is alive, and where most besides gradients is."""

    peak: dict[str, int]
    peak_besides_gradients: dict[str, int]
    gradients: int  # of all trained parameters
    trained: int  # numbers in them
    communicated: int  # collectives of an update, whole tensors, all ranks' parts


def _trace_update(
    config: RunConfig, checkpointing: int, workspace: OpWorkspace, *, is_sharded: bool
) -> _Traced:
    """An update of a run that has begun: the optimizer has its moments."""
    live = MemoryTracker(workspace)
    with _fake_ranks(config.trainer.world_size if is_sharded else 1) as mesh:
        with torch.device("meta"):
            model = LanguageModel(config.model)
        model.train_only(config.trainer.train_only)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        prepare_blocks(model, checkpoint_every=checkpointing, compiled=False)
        if mesh is not None:
            # On fake tensors this would take minutes for 1,024 ranks; on `meta` ones it does not.
            shard(model, mesh, MixedPrecisionPolicy())
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            live.part = "parameters"
            model.to_empty(device="cpu")
            for parameter in model.parameters() if mesh is None else ():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda one: live.assign(one.grad, "gradients")
                    )
            optimizer = build_optimizer(model, config.optim)
            _create_optimizer_state(optimizer, live)
            live.reset_peak()
            inner, last = _update(config, model, optimizer, live)
    communicated = (config.accumulation - 1) * inner + last
    return _Traced(
        peak=live.peak,
        peak_besides_gradients=live.peak_besides_gradients,
        gradients=gradients,
        trained=trained,
        communicated=communicated,
    )


def _create_optimizer_state(optimizer: torch.optim.Optimizer, live: MemoryTracker) -> None:
    """Let it make its moments, as the first update of a run does."""
    live.part = "optimizer"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _update(
    config: RunConfig, model: LanguageModel, optimizer: torch.optim.Optimizer, live: MemoryTracker
) -> tuple[int, int]:
    """As Pretraining takes it; bytes communicated in a micro-batch before the last, and in it.

    A third micro-batch finds the memory as the second does.
    """
    live.part = "activations"
    micro_batches = min(config.accumulation, 2)
    communicated = []
    is_mixed = config.trainer.precision == "bf16-mixed"
    # Lightning runs all of the step below autocast, so that weights in 16 bits live to its end.
    with torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext():
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            if isinstance(model, FSDPModule):
                cast(FSDPModule, model).set_requires_gradient_sync(is_last)
            before = live.communicated_bytes
            tokens, target = torch.zeros(
                2, config.trainer.micro_batch, config.data.context, dtype=torch.int64
            )
            model.loss(tokens, target).backward()
            del tokens, target
            if not is_last:
                # What FSDP holds back is whole gradients, which no parameter shows.
                live.reassign("activations", "gradients")
            communicated.append(live.communicated_bytes - before)
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.gradient_clip or math.inf)
        live.part = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    live.part = "activations"
    return communicated[0] if micro_batches > 1 else 0, communicated[-1]


@contextmanager
def _fake_ranks(count: int) -> Iterator[DeviceMesh | None]:
    """A mesh of this rank and others that are not there; None for one."""
    if count == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def _deepspeed(config: RunConfig, choice: MemorySettings, traced: _Traced) -> Plan:
    """Activations as traced, the rest by the formulas of the ZeRO paper and DeepSpeed's docs.

    Parameters and gradients are in the precision of the forward pass, and an optimizer's share is
    a float32 copy of the parameters and two moments, 12 bytes a parameter.
    """
    ranks, stage, size = config.trainer.world_size, choice.stage, traced.trained
    frozen = traced.peak["parameters"] - 4 * size
    width = 2 if config.trainer.precision == "bf16-mixed" else 4
    whole = width * size
    bucket = width * min(size, _DEEPSPEED_BUCKET)
    # overlap_comm, which Lightning turns on, reduces one bucket while it fills another.
    buffers = 2 * bucket if stage in (1, 2) else bucket + width * min(size, _DEEPSPEED_LIVE)
    # Stage 1 reduces once an update, 2 and 3 after each micro-batch; 3 also gathers twice for each.
    passes = {1: 2, 2: config.accumulation + 1, 3: 3 * config.accumulation}[stage or 0]
    return Plan(
        parameters=frozen + (math.ceil(whole / ranks) if stage == 3 else whole),
        gradients=whole if stage == 1 else math.ceil(whole / ranks),
        optimizer=math.ceil(12 * size / ranks),
        activations=traced.peak_besides_gradients["activations"],
        copies=buffers,
        workspace=traced.peak_besides_gradients["workspace"],
        sent=(ranks - 1) / ranks * passes * whole,
    )
