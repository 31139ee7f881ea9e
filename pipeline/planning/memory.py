"""Memory and communication of a rank under each strategy, from tracing one update without data.

The real model makes a real update on tensors that have shapes but no data, so that the numbers
follow the code. DeepSpeed cannot be traced like that: `_deepspeed` has the formulas of its
documentation.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import build_optimizer, num_moments
from longhaul.pipeline.distributed.blocks import (
    Checkpointing,
    num_replicas,
    prepare_blocks,
    shard_as_configured,
)
from longhaul.pipeline.distributed.context_parallel import ContextParallel
from longhaul.pipeline.distributed.zero import bucket_sizes
from longhaul.pipeline.planning.capacity import num_parameters
from longhaul.pipeline.planning.memory_tracker import CATEGORIES, MemoryTracker
from longhaul.pipeline.planning.op_workspaces import Backend, OpWorkspace, traced_as
from longhaul.pipeline.planning.phases import phases

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
    checkpointing: Checkpointing = 0

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
    evaluation_model: int = 0  # of the copy that evaluation.tasks use; 0 without tasks

    @property
    def total(self) -> int:
        """Bytes of all tensors at the peak of an update."""
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def held(self) -> int:
        """Bytes of a GPU that the process holds at its peak, in an update or an evaluation."""
        lasting = self.parameters + self.gradients + self.optimizer
        tensors = max(self.total, lasting + self.evaluation_model if self.evaluation_model else 0)
        return math.ceil((1 + _GAPS) * tensors) + _CONTEXT + self.groups * _GROUP


class Planner:
    """Makes the plans of one config on one type of device, and traces each case only once."""

    def __init__(self, config: RunConfig, backend: Backend = "triton") -> None:
        self._config = config
        self._backend = backend
        self._workspace = OpWorkspace()
        self._traced: dict[tuple[int, int, int, Checkpointing, str], _Traced] = {}

    def plan(self, settings: MemorySettings, micro_batch: int | None = None) -> Plan:
        """The plan of a rank with these settings; `micro_batch` None means the config's.

        It is of the update that needs most memory, where they differ during the run, but sends as
        much as the one that sends most.
        """
        config = self._config
        if micro_batch is not None:
            trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
            config = dataclasses.replace(config, trainer=trainer)
        plans = [self._plan_of_update(phase, settings) for phase in phases(config)]
        # An evaluation loads the whole model on each rank, in float32.
        whole = 4 * num_parameters(config.model) if config.evaluation.tasks else 0
        return dataclasses.replace(
            max(plans, key=lambda plan: plan.total),
            sent=max(plan.sent for plan in plans),
            groups=_num_groups(config, settings),
            evaluation_model=whole,
        )

    def _plan_of_update(self, config: RunConfig, settings: MemorySettings) -> Plan:
        trainer, traced = config.trainer, self._trace(config, settings)
        if settings.strategy == "deepspeed":
            return _deepspeed(config, settings, traced)
        if settings.strategy == "single":
            return Plan(**traced.peak, sent=0.0)
        if settings.strategy == "ddp":
            # Gradients are views of the buckets that are all-reduced (gradient_as_bucket_view), and
            # the buckets exist from start to end.
            peak = traced.peak_besides_gradients | {"gradients": traced.gradients}
            reduced = _all_reduced(traced.gradients, trainer.world_size)
            return Plan(**peak, sent=reduced + traced.exchanged)
        replicas = num_replicas(trainer, traced.parameters)
        shards = trainer.world_size // replicas
        sent = (shards - 1) / shards * traced.communicated
        sent += _all_reduced(traced.gradients / shards, replicas)
        return Plan(**traced.peak, sent=sent + traced.exchanged)

    def _trace(self, config: RunConfig, settings: MemorySettings) -> "_Traced":
        # DDP and DeepSpeed have the activations of one process, but for the parts of sequences.
        strategy = "ddp" if settings.strategy == "deepspeed" else settings.strategy
        sizes = config.data.context, config.trainer.micro_batch, config.accumulation
        key = (*sizes, settings.checkpointing, strategy)
        if key not in self._traced:
            with traced_as(self._backend):
                self._traced[key] = _trace_update(
                    config, settings.checkpointing, self._workspace, strategy
                )
        return self._traced[key]


class _LastPart(ContextParallel):
    """The last part of a sequence, whose rank holds most: the keys and values of all earlier parts.

    What the other ranks would send is never read.
    """

    def __init__(self, count: int) -> None:
        self.index, self.count, self.bytes_sent = count - 1, count, 0

    def all_gather(self, mine: Tensor) -> Tensor:
        self.bytes_sent += (self.count - 1) * mine.numel()
        return mine.new_empty(self.count, mine.numel())

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        # No part comes after the last one, but those in the middle send as much as they receive.
        others = max(sum(x) - x[self.index] for x in (sent, received))
        self.bytes_sent += others * rows.shape[1]
        return rows.new_empty(sum(received), rows.shape[1])


def _all_reduced(size: float, ranks: int) -> float:
    """Bytes that each of some ranks sends to all-reduce so many: a reduce-scatter, a gather."""
    return 2 * (ranks - 1) / ranks * size


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
    moments: int  # number of elements of the optimizer's moments
    parameters: int  # of the model, trained or not
    communicated: int  # bytes of an update's collectives of FSDP, as whole tensors
    exchanged: int  # bytes that an update sends to the ranks that share its sequences


def _trace_update(
    config: RunConfig, checkpointing: Checkpointing, workspace: OpWorkspace, strategy: str
) -> _Traced:
    """Trace an update that is not the run's first: the optimizer already has its moments."""
    tracker = MemoryTracker(workspace)
    is_sharded = strategy == "fsdp" and config.trainer.world_size > 1
    parts = 1 if strategy == "single" else config.trainer.context_parallel
    with _fake_ranks(config.trainer.world_size) if is_sharded else nullcontext():
        model = build_on_meta(config.model)
        model.train_only(config.trainer.train_only)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        parameters = model.num_parameters()
        prepare_blocks(model, checkpointing=checkpointing, compiled=False)
        if parts > 1:
            model.split_sequence(_LastPart(parts))
        if is_sharded:
            # On meta tensors, since on fake tensors this takes minutes for 1,024 ranks.
            shard_as_configured(model, config.trainer, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True), tracker:
            tracker.category = "parameters"
            model.to_empty(device="cpu")
            for parameter in () if is_sharded else model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda one: tracker.assign(one.grad, "gradients")
                    )
            optimizer = build_optimizer(model, config.optim)
            moments = num_moments(optimizer.param_groups)
            _create_optimizer_state(optimizer, tracker)
            tracker.reset_peak()
            inner, last, exchanged = _update(config, model, optimizer, tracker)
    communicated = (config.accumulation - 1) * inner + last
    return _Traced(
        peak=tracker.peak,
        peak_besides_gradients=tracker.peak_besides_gradients,
        gradients=gradients,
        trained=trained,
        moments=moments,
        parameters=parameters,
        communicated=communicated,
        exchanged=config.accumulation * exchanged,
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
) -> tuple[int, int, int]:
    """Make an update like Pretraining does.

    At most two micro-batches are traced, since a third needs the same memory as the second.

    Returns:
        Bytes that FSDP communicates in each micro-batch but the last, and from the last on to the
        end of the update, and those that are sent in any to the ranks that share sequences.
    """
    part = cast(_LastPart | None, model.sequence_part)
    length = config.data.context // (1 if part is None else part.count)
    tracker.category = "activations"
    micro_batches = min(config.accumulation, 2)
    communicated = []
    is_mixed = config.trainer.precision == "bf16-mixed"
    # Lightning runs the whole step inside autocast, so 16-bit copies of weights live to its end.
    with torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext():
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            if isinstance(model, FSDPModule):
                cast(FSDPModule, model).set_requires_all_reduce(is_last)
            before = tracker.communicated_bytes
            rows = config.trainer.micro_batch
            tokens, target = torch.zeros(2, rows, length, dtype=torch.int64)
            # As if the shards said where documents end, which nobody has opened.
            is_first = None
            if config.data.document_mask:
                is_first = torch.zeros(rows, config.data.context, dtype=torch.bool)
            model.loss(tokens, target, is_first=is_first).backward()
            del tokens, target, is_first
            if not is_last:
                # FSDP holds gradients that replicas have not all-reduced, in no `.grad`.
                tracker.reassign("activations", "gradients")
            communicated.append(tracker.communicated_bytes - before)
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.gradient_clip or math.inf)
        tracker.category = "optimizer"
        before = tracker.communicated_bytes
        optimizer.step()
        communicated[-1] += tracker.communicated_bytes - before
        optimizer.zero_grad()
    tracker.category = "activations"
    exchanged = 0 if part is None else part.bytes_sent // micro_batches
    return communicated[0] if micro_batches > 1 else 0, communicated[-1], exchanged


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """Collectives with simulated ranks."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _deepspeed(config: RunConfig, settings: MemorySettings, traced: _Traced) -> Plan:
    """Activations as traced, the rest by the formulas of the ZeRO paper and DeepSpeed's docs.

    Parameters and gradients have the precision of the forward pass. The optimizer has a float32
    copy of the parameters, and the moments.
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
        optimizer=0
        if config.trainer.offload_optimizer
        else math.ceil(4 * (size + traced.moments) / ranks),
        activations=traced.peak_besides_gradients["activations"],
        copies=buffers,
        workspace=traced.peak_besides_gradients["workspace"],
        sent=(ranks - 1) / ranks * passes * whole + traced.exchanged,
    )
