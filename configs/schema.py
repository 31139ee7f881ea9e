"""The parts of a run's configuration that only the pipeline reads, checked when they are built.

They are here and not next to the pipeline's code, because configs must not import pipeline. What
is imported here is quick to import, so that values are checked before torch is.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from longhaul.datamodules.files.untrusted import AtLeastOne, check_fields
from longhaul.datamodules.urls import SQLITE

# sbatch's formats of times, but for minutes alone, and of sizes.
_TIME = re.compile(r"\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED", re.ASCII)
_MODULE = re.compile(r"[\w.][\w.+/@:=~-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII)
_IMAGE = re.compile(r"[^\s-]\S*")
_MOUNT = re.compile(r"[^\s,:-][^\s,:]*:[^\s,:]+(:[a-z+]+)?")
_MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Token budget, devices, parallelism, precision and time limits."""

    max_tokens: AtLeastOne
    """Budget of the run in tokens, 1 or more."""

    # Every smaller one may be tried, to suggest one that fits.
    micro_batch: Annotated[int, Field(ge=1, le=1 << 20)]
    """Samples that a rank passes through the model at a time, 1 or more."""

    accelerator: Literal["auto", "gpu", "cpu"] = "auto"
    """auto (GPUs where there are any) | gpu | cpu: what the ranks train on."""

    strategy: Literal["single", "ddp", "fsdp", "deepspeed"] = "single"
    """single (one process) | ddp | fsdp | deepspeed: how ranks train together."""

    deepspeed_stage: Literal[1, 2, 3] = 2
    """1: shard moments | 2: gradients too | 3: parameters too; deepspeed only."""

    offload_optimizer: bool = False
    """Keep the moments, and make the updates, in main memory; deepspeed only."""

    replicas: AtLeastOne = 1
    """Number of groups of ranks that each hold the whole model, a divisor of ranks; fsdp only."""

    no_shard_below: Annotated[int, Field(ge=0)] = 0
    """Number of parameters below which every rank holds the whole model, 0 or more; fsdp only."""

    context_parallel: AtLeastOne = 1
    """Ranks that share each sequence, a divisor of ranks and context; degree 4 at most above 1."""

    activation_checkpointing: Annotated[int, Field(ge=0)] | Literal["light"] = 0
    """n: recompute every n-th block in the backward pass; light: all but products; 0: none."""

    compile: bool | None = None
    """Compile each block; null: on GPUs; never with deepspeed, context_parallel, deterministic."""

    deterministic: bool = False
    """Repeat a run to the bit on GPUs, and with ddp on 3 ranks or more; slower; no compile."""

    # There is a process for each.
    devices: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Processes per node with one device each, 1 or more."""

    nodes: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Number of machines, 1 or more."""

    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """32-true | bf16-mixed: products in bf16; deepspeed: weights too, beside a float32 copy."""

    # NumPy has no larger seeds.
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Seed of the initial weights and of the order of samples, 0 to 2^32 - 1."""

    train_only: Literal["initial_state"] | None = None
    """initial_state: train the learned initial states and freeze all else; null: train all."""

    start_from: str | None = None
    """Run, checkpoint or exported folder to start from (it may lack initial states), or null."""

    branch_from: str | None = None
    """Run of the same settings that this wsd run goes on from, before both decay; or null."""

    # Three years; a lock cannot wait for more than 292.
    hang_seconds: Annotated[float, Field(ge=1, le=1e8)] = 1800.0
    """Longest time of an update, validation, save or evaluation task, in seconds, 1 to 1e8."""

    stop_seconds: Annotated[float, Field(ge=1, le=1e8)] = 90.0
    """Longest time from a signal to stop to the end of the process, in seconds, 1 to 1e8."""

    validate_every_tokens: AtLeastOne = 10_000_000
    """Tokens between validations, 1 or more; another one follows the last update."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.")
        if self.start_from is not None and self.branch_from is not None:
            raise ValueError(
                "trainer.branch_from: found with trainer.start_from, wanted one of them: a branch "
                "goes on with the weights of its run"
            )
        self._check_ranks()
        self._check_strategy()

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or of groups of ranks that share sequences, with different samples."""
        return self.world_size // self.context_parallel

    def is_compiled(self, *, on_gpu: bool) -> bool:
        """Whether blocks are compiled on GPUs, or on CPUs."""
        if self.compile is not None:
            return self.compile
        can_be = self.strategy != "deepspeed" and self.context_parallel == 1
        return on_gpu and can_be and not self.deterministic

    def _check_ranks(self) -> None:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(
                f"trainer.strategy: found single with {self.world_size} processes, wanted ddp, "
                "fsdp or deepspeed"
            )
        for name in ("context_parallel", "replicas"):
            if self.world_size % getattr(self, name):
                raise ValueError(
                    f"trainer.{name}: found {getattr(self, name)}, wanted a divisor of "
                    f"trainer.devices x trainer.nodes = {self.world_size}"
                )

    def _check_strategy(self) -> None:
        for name, default, strategy in (
            ("deepspeed_stage", 2, "deepspeed"),
            ("offload_optimizer", False, "deepspeed"),
            ("replicas", 1, "fsdp"),
            ("no_shard_below", 0, "fsdp"),
        ):
            if getattr(self, name) != default and self.strategy != strategy:
                raise ValueError(
                    f"trainer.{name}: found {getattr(self, name)} with trainer.strategy "
                    f"{self.strategy}, wanted {default}, or trainer.strategy {strategy}"
                )
        if self.compile and (self.context_parallel > 1 or self.strategy == "deepspeed"):
            raise ValueError(
                "trainer.compile: found true with trainer.context_parallel or trainer.strategy "
                "deepspeed, wanted false"
            )
        if self.compile and self.deterministic:
            # The prefix sums that torch compiles add in an order that depends on time (pytorch
            # issue 190946).
            raise ValueError(
                "trainer.compile: found true with trainer.deterministic, wanted one of them false"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and which of them to keep."""

    every_tokens: AtLeastOne = 50_000_000
    """Tokens between checkpoints, 1 or more; another one follows the last update."""

    keep_last: AtLeastOne = 2
    """Number of newest checkpoints to keep, 1 or more."""

    keep_every: AtLeastOne | None = None
    """n: also keep every n-th regular checkpoint for ever, 1 or more; null: none."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks of `longhaul evaluate` that run during training, each time on a new checkpoint."""

    tasks: list[str] = field(default_factory=list)
    """Names of tasks, such as positions, passkey, recall; an empty list: no evaluation."""

    every_tokens: AtLeastOne = 100_000_000
    """Tokens between evaluations, 1 or more; another one follows the last update."""

    def __post_init__(self) -> None:
        check_fields(self, "evaluation.")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where MLflow stores the run, and how often metrics are recorded."""

    uri: str = "sqlite:///mlflow.db"
    """Tracking store: sqlite:///FILE, or http(s)://HOST:PORT of a server."""

    experiment: str = "longhaul"
    """Name of the MLflow experiment, 1 to 500 characters."""

    every_updates: AtLeastOne = 1
    """Updates between records of the training metrics, 1 or more."""

    parent_run_id: str | None = None
    """Id of the parent run in MLflow, or null; --sweep sets it."""

    def __post_init__(self) -> None:
        check_fields(self, "tracking.")
        if not self.uri.startswith((SQLITE, "http://", "https://")):
            raise ValueError(
                f"tracking.uri: found {self.uri!r}, wanted sqlite:///FILE or http(s)://HOST:PORT"
            )
        if self.uri.startswith(SQLITE) and re.search("[?#]", self.uri):
            raise ValueError(f"tracking.uri: found {self.uri!r}, wanted a path without ? and #")
        if not self.experiment:
            raise ValueError("tracking.experiment: found '', wanted a name")
        if len(self.experiment) > 500:  # MLflow refuses it too
            found = f"{len(self.experiment)} characters"
            raise ValueError(f"tracking.experiment: found {found}, wanted 500 at most")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What a job requests from Slurm. null leaves a value to the default of the cluster."""

    partition: str | None = None
    """Name of the partition, or null."""

    account: str | None = None
    """Name of the account that is charged, or null."""

    qos: str | None = None
    """Name of the quality of service, or null."""

    constraint: str | None = None
    """Features that nodes must have, in the format of sbatch --constraint, or null."""

    time: str | None = None
    """Time limit in a format of sbatch --time other than minutes alone: 0-12:00:00; or null."""

    gpu: str | None = None
    """Type of the trainer.devices GPUs per node, or `any`; null: no GPUs."""

    cpus_per_task: AtLeastOne | None = None
    """CPUs per rank, its data workers included, 1 or more; null: 8 with slurm.gpu."""

    memory: str | None = None
    """Memory per node in the format of sbatch --mem, such as 64G; or null."""

    modules: list[str] = field(default_factory=list)
    """Modules that the job loads first, in this order, such as cuda/12.4."""

    environment: list[str] = field(default_factory=list)
    """Environment variables of the job, each NAME=VALUE; scripts keep them, so no secrets."""

    container: str | None = None
    """Image for srun --container-image (pyxis), whose `python` has longhaul; null: no container."""

    container_mounts: list[str] = field(default_factory=list)
    """Folders for srun --container-mounts, each SRC:DST; the runs and the data among them."""

    exclusive: bool = False
    """Do not share the nodes with other jobs."""

    requeue: bool = True
    """Let the job requeue itself; false where the cluster forbids it (then use submit --chain)."""

    max_restarts: AtLeastOne = 50
    """Number of times that a job may be requeued, 1 or more."""

    then: list[Literal["evaluate", "export"]] = field(default_factory=list)
    """Steps of a second job after the training, in this order: evaluate, export."""

    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as --reservation=NAME."""

    def __post_init__(self) -> None:
        check_fields(self, "slurm.")
        # Minutes alone may be what another reader of YAML has made of 12:00:00: 43200.
        if self.time is not None and not _TIME.fullmatch(self.time):
            found = f"the number {self.time}" if self.time.isdigit() else repr(self.time)
            raise ValueError(f"slurm.time: found {found}, wanted days too, as in 0-12:00:00")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise ValueError(f"slurm.memory: found {self.memory!r}, wanted a size, such as 64G")
        for key, entries, pattern, wanted in (
            ("modules", self.modules, _MODULE, "the name of a module, such as cuda/12.4"),
            ("environment", self.environment, _VARIABLE, "NAME=VALUE on one line"),
            ("container", filter(None, [self.container]), _IMAGE, "the name or path of an image"),
            ("container_mounts", self.container_mounts, _MOUNT, "SRC:DST, or SRC:DST:ro"),
        ):
            for entry in entries:
                if not (pattern.fullmatch(entry) and entry.isprintable()):
                    raise ValueError(f"slurm.{key}: found {entry!r}, wanted {wanted}")
        if self.container_mounts and self.container is None:
            raise ValueError("slurm.container: found null with container_mounts, wanted an image")
        for option in self.extra:
            if not option.startswith("-"):
                raise ValueError(
                    f"slurm.extra: found {option!r}, wanted --option or --option=value"
                )
