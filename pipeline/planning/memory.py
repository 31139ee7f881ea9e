"""Memory and communication of a rank under each strategy, from tracing one update without data.

The real model makes a real update on tensors that have shapes but no data, so that the numbers
follow the code. DeepSpeed cannot be traced like that: `_deepspeed` has the formulas of its
documentation.
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
from longhaul.pipeline.distributed.blocks import prepare_blocks, shard
from longhaul.pipeline.distributed.zero import bucket_sizes
from longhaul.pipeline.planning.capacity import num_parameters
from longhaul.pipeline.planning.memory_tracker import CATEGORIES, MemoryTracker
from longhaul.pipeline.planning.op_workspaces import Backend, OpWorkspace, traced_as

# Elements of the live parameters of stage 3, DeepSpeed's own default.
_DEEPSPEED_LIVE = 1_000_000_000

# What a process holds on a GPU besides its tensors, estimated until it is measured: CUDA's context
# with the loaded modules, NCCL's buffers for each group of ranks, and the share of the tensors'
# memory that the allocator cannot use, between them or in rounding.
_CONTEXT = 1_000_000_000
_GROUP = 500_000_000
_GAPS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The settings that decide a rank's memory, besides the model and the micro-batch."""

    strategy: str  # single | ddp | fsdp | deepspeed
    stage: int | None = None  # of DeepSpeed
    checkpointing: int = 0  # every n-th block is recomputed; 0: none

    @property
    def name(self) -> str:
        return self.strategy if self.stage is None else f"{self.strategy} {self.stage}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A rank's bytes at the peak of an update, and the bytes that it sends per update."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # including gradients of activations
    copies: int  # of parameters: gathered, cast to 16 bits; and buffers of collectives
    workspace: int  # inside of ops: logits, states, features
    sent: float
    groups: int = 0  # of ranks that communicate over NCCL
    evaluated: int = 0  # of the model that is evaluated beside the training; 0: none is

    @property
    def total(self) -> int:
        """Bytes of all tensors at the peak of an update."""
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def held(self) -> int:
        """Bytes of a GPU that the process holds at its peak, in an update or an evaluation."""
        lasting = self.parameters + self.gradients + self.optimizer
        tensors = max(self.total, lasting + self.evaluated if self.evaluated else 0)
        return math.ceil((1 + _GAPS) * tensors) + _CONTEXT + self.groups * _GROUP


class Planner:
    """Makes the plans of one config on one type of device, and traces each case only once."""

    def __init__(self, config: RunConfig, backend: Backend = "triton") -> None:
        self._config = config
        self._backend = backend
        self._workspace = OpWorkspace()
        self._traced: dict[tuple[int, int, bool], _Traced] = {}

    def plan(self, settings: MemorySettings, micro_batch: int | None = None) -> Plan:
        """The plan of a rank with these settings; `micro_batch` None means the config's."""
        config = self._config
        plan = self._plan_of_update(settings, micro_batch)
        # An evaluation loads the whole model on each rank, in float32.
        whole = 4 * num_parameters(config.model) if config.evaluation.tasks else 0
        return dataclasses.replace(plan, groups=_num_groups(config, settings), evaluated=whole)

    def _plan_of_update(self, settings: MemorySettings, micro_batch: int | None) -> Plan:
        config = self._config
        if micro_batch is not None:
            trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
            config = dataclasses.replace(config, trainer=trainer)
        ranks = config.trainer.world_size
        traced = self._trace(config, settings)
        if settings.strategy == "deepspeed":
            return _deepspeed(config, settings, traced)
        if settings.strategy == "single":
            return Plan(**traced.peak, sent=0.0)
        others = (ranks - 1) / ranks
        if settings.strategy == "ddp":
            # Gradients are views of the buckets that are all-reduced (gradient_as_bucket_view), and
            # the buckets exist from start to end.
            peak = traced.peak_besides_gradients | {"gradients": traced.gradients}
            return Plan(**peak, sent=2 * others * traced.gradients)
        return Plan(**traced.peak, sent=others * traced.communicated)

    def _trace(self, config: RunConfig, settings: MemorySettings) -> "_Traced":
        is_sharded = settings.strategy == "fsdp"
        key = config.trainer.micro_batch, settings.checkpointing, is_sharded
        if key not in self._traced:
            with traced_as(self._backend):
                self._traced[key] = _trace_update(
                    config, settings.checkpointing, self._workspace, is_sharded=is_sharded
                )
        return self._traced[key]


def _num_groups(config: RunConfig, settings: MemorySettings) -> int:
    """Groups of ranks that a rank belongs to, each with buffers of its own in NCCL."""
    if settings.strategy == "single":
        return 0
    # All ranks; those that share sequences; with FSDP those that share the model, and their copies.
    sharding = 1 + (config.trainer.replicas > 1) if settings.strategy == "fsdp" else 0
    return 1 + (config.trainer.context_parallel > 1) + sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """Bytes by category: at the peak, and at the peak of everything but gradients."""

    peak: dict[str, int]
    peak_besides_gradients: dict[str, int]
    gradients: int  # of all trained parameters
    trained: int  # number of their elements
    communicated: int  # bytes of an update's collectives, as whole tensors


def _trace_update(
    config: RunConfig, checkpointing: int, workspace: OpWorkspace, *, is_sharded: bool
) -> _Traced:
    """Trace an update that is not the run's first: the optimizer already has its moments."""
    tracker = MemoryTracker(workspace)
    with _fake_ranks(config.trainer.world_size if is_sharded else 1) as mesh:
        with torch.device("meta"):
            model = LanguageModel(config.model)
        model.train_only(config.trainer.train_only)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        prepare_blocks(model, checkpoint_every=checkpointing, compiled=False)
        if mesh is not None:
            # On meta tensors, since on fake tensors this takes minutes for 1,024 ranks.
            shard(model, mesh, MixedPrecisionPolicy())
        with FakeTensorMode(allow_non_fake_inputs=True), tracker:
            tracker.category = "parameters"
            model.to_empty(device="cpu")
            for parameter in model.parameters() if mesh is None else ():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda one: tracker.assign(one.grad, "gradients")
                    )
            optimizer = build_optimizer(model, config.optim)
            _create_optimizer_state(optimizer, tracker)
            tracker.reset_peak()
            inner, last = _update(config, model, optimizer, tracker)
    communicated = (config.accumulation - 1) * inner + last
    return _Traced(
        peak=tracker.peak,
        peak_besides_gradients=tracker.peak_besides_gradients,
        gradients=gradients,
        trained=trained,
        communicated=communicated,
    )


def _create_optimizer_state(optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> None:
    """Let the optimizer create its moments, as in the first update of a run."""
    tracker.category = "optimizer"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _update(
    config: RunConfig,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    tracker: MemoryTracker,
) -> tuple[int, int]:
    """Make an update like Pretraining does.

    At most two micro-batches are traced, since a third needs the same memory as the second.

    Returns:
        Bytes communicated in each micro-batch but the last, and in the last.
    """
    tracker.category = "activations"
    micro_batches = min(config.accumulation, 2)
    communicated = []
    is_mixed = config.trainer.precision == "bf16-mixed"
    # Lightning runs the whole step inside autocast, so 16-bit copies of weights live to its end.
    with torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext():
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            if isinstance(model, FSDPModule):
                cast(FSDPModule, model).set_requires_gradient_sync(is_last)
            before = tracker.communicated_bytes
            tokens, target = torch.zeros(
                2, config.trainer.micro_batch, config.data.context, dtype=torch.int64
            )
            model.loss(tokens, target).backward()
            del tokens, target
            if not is_last:
                # FSDP keeps unsharded gradients here, which are no parameter's `.grad`.
                tracker.reassign("activations", "gradients")
            communicated.append(tracker.communicated_bytes - before)
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.gradient_clip or math.inf)
        tracker.category = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    tracker.category = "activations"
    return communicated[0] if micro_batches > 1 else 0, communicated[-1]


@contextmanager
def _fake_ranks(count: int) -> Iterator[DeviceMesh | None]:
    """A mesh of this rank and of simulated others; None for a single rank."""
    if count == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def _deepspeed(config: RunConfig, settings: MemorySettings, traced: _Traced) -> Plan:
    """Activations as traced, the rest by the formulas of the ZeRO paper and DeepSpeed's docs.

    Parameters and gradients have the precision of the forward pass. The optimizer has a float32
    copy of the parameters and two moments, 12 bytes per parameter.
    """
    ranks, stage, size = config.trainer.world_size, settings.stage, traced.trained
    frozen = traced.peak["parameters"] - 4 * size
    width = 2 if config.trainer.precision == "bf16-mixed" else 4
    whole = width * size
    bucket = width * bucket_sizes(size)["reduce_bucket_size"]
    buffers = {
        1: bucket,
        2: 2 * bucket,  # with overlap_comm, which reduces one while it fills another
        3: bucket + width * min(size, _DEEPSPEED_LIVE),
    }[stage or 0]
    # Stage 1 reduces once per update, 2 and 3 after each micro-batch; 3 gathers twice for each.
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
