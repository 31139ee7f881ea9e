"""One run as one tree of frozen dataclasses; every tree that loads can start."""

from dataclasses import dataclass, field

from longhaul.datamodules.config import DataConfig
from longhaul.modules.language_model import LanguageModelConfig
from longhaul.modules.optim import OptimConfig

# The configs of the pipeline's own parts stand here and not beside what they configure, because
# configs must not import pipeline.


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Devices, precision, budget."""

    max_tokens: int
    """Budget of the run, tokens."""

    micro_batch: int
    """Samples a rank passes through the model at a time."""

    strategy: str = "single"
    """single | ddp | fsdp | deepspeed."""

    deepspeed_stage: int = 2
    """1 | 2 | 3: what deepspeed shards, moments; gradients too; parameters too."""

    offload_optimizer: bool = False
    """Keep deepspeed's moments, and make its updates, in main memory."""

    replicas: int = 1
    """Groups of ranks that each hold the whole model under fsdp."""

    no_shard_below: int = 0
    """Parameters of a model from which on fsdp shards it; a smaller one every rank holds whole."""

    context_parallel: int = 1
    """Ranks that share a sequence, each with a part of it; kinds of linear cost only."""

    activation_checkpointing: int = 0
    """Every n-th block is computed again in the backward pass; 0 is none."""

    compile: bool = False
    """Compile each block."""

    devices: int = 1
    """Processes a node, one device each."""

    nodes: int = 1
    """Machines."""

    precision: str = "32-true"
    """32-true | bf16-mixed: products in bf16. Under deepspeed also all weights, but for a copy."""

    seed: int = 0
    """Of the initial weights and of the data's order."""

    train_only: str | None = None
    """initial_state: train the learned initial states, and freeze everything else."""

    start_from: str | None = None
    """Run, checkpoint or exported folder whose weights a run begins with, but initial states."""

    hang_seconds: float = 1800.0
    """Longest that an update, a validation, a save or a task of an evaluation may take, seconds."""

    stop_seconds: float = 90.0
    """Longest that a stop asked for by a signal may take before the process ends, seconds."""

    validate_every_tokens: int = 10_000_000
    """Tokens between passes over the validation samples; one more follows the last update."""

    def __post_init__(self) -> None:
        _one_of("trainer.strategy", self.strategy, ("single", "ddp", "fsdp", "deepspeed"))
        _one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed"))
        if self.train_only is not None:
            _one_of("trainer.train_only", self.train_only, ("initial_state",))
        _positive(
            "trainer",
            self,
            "max_tokens",
            "micro_batch",
            "devices",
            "nodes",
            "context_parallel",
            "replicas",
            "hang_seconds",
            "stop_seconds",
            "validate_every_tokens",
        )
        self._check_ranks()
        self._check_strategy()

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks that share sequences, with samples of their own."""
        return self.world_size // self.context_parallel

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
        if self.deepspeed_stage not in (1, 2, 3):
            raise ValueError(
                f"trainer.deepspeed_stage: found {self.deepspeed_stage}, wanted 1, 2 or 3"
            )
        for name, idle, strategy in (
            ("deepspeed_stage", 2, "deepspeed"),
            ("offload_optimizer", False, "deepspeed"),
            ("replicas", 1, "fsdp"),
            ("no_shard_below", 0, "fsdp"),
        ):
            if getattr(self, name) != idle and self.strategy != strategy:
                raise ValueError(
                    f"trainer.{name}: found {getattr(self, name)} with trainer.strategy "
                    f"{self.strategy}, wanted {idle}, or trainer.strategy {strategy}"
                )
        if self.compile and (self.context_parallel > 1 or self.strategy == "deepspeed"):
            raise ValueError(
                "trainer.compile: found true with trainer.context_parallel or trainer.strategy "
                "deepspeed, wanted false"
            )
        for name in ("no_shard_below", "activation_checkpointing"):
            if getattr(self, name) < 0:
                raise ValueError(f"trainer.{name}: found {getattr(self, name)}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every_tokens: int = 50_000_000
    """Tokens between checkpoints; one more follows the last update."""

    keep_last: int = 2
    """Newest checkpoints that are kept."""

    keep_every: int | None = None
    """Also keep, for ever, each n-th checkpoint of the schedule."""

    def __post_init__(self) -> None:
        _positive("checkpoint", self, "every_tokens", "keep_last")
        if self.keep_every is not None:
            _positive("checkpoint", self, "keep_every")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What of `longhaul evaluate` training does on the way, on checkpoints of its own."""

    tasks: list[str] = field(default_factory=list)
    """Tasks, such as positions, passkey, recall; none does nothing."""

    every_tokens: int = 100_000_000
    """Tokens between evaluations, each of a checkpoint; one more follows the last update."""

    def __post_init__(self) -> None:
        _positive("evaluation", self, "every_tokens")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where MLflow keeps the run."""

    uri: str = "sqlite:///mlflow.db"
    """Tracking store: sqlite:///FILE, or http(s)://HOST:PORT of a server."""

    experiment: str = "longhaul"
    """Experiment that holds the run."""

    every_updates: int = 1
    """Updates between records of the training metrics."""

    parent_run_id: str | None = None
    """MLflow run that this one is shown below; `submit --sweep` sets it."""

    def __post_init__(self) -> None:
        if not self.uri.startswith(("sqlite:///", "http://", "https://")):
            raise ValueError(
                f"tracking.uri: found {self.uri!r}, wanted sqlite:///FILE or http(s)://HOST:PORT"
            )
        if not self.experiment:
            raise ValueError("tracking.experiment: found '', wanted a name")
        _positive("tracking", self, "every_updates")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What a job asks of the cluster; an absent value is left to the cluster's default."""

    partition: str | None = None
    """Partition name."""

    account: str | None = None
    """Account that pays."""

    qos: str | None = None
    """Quality of service."""

    constraint: str | None = None
    """Features that the nodes must have, as sbatch --constraint takes them."""

    time: str | None = None
    """Time limit, as sbatch --time takes it, with its days: 0-12:00:00."""

    gpu: str | None = None
    """Kind of GPU, trainer.devices of them a node, or `any`; null asks for none."""

    cpus_per_task: int | None = None
    """CPUs of each rank, its data workers included."""

    memory: str | None = None
    """Memory of a node, as sbatch --mem takes it."""

    exclusive: bool = False
    """Share the nodes with no other job."""

    requeue: bool = True
    """Let the job queue itself again; false where the cluster forbids it (submit --chain)."""

    max_restarts: int = 50
    """Times that a job may be queued again before it gives up."""

    then: list[str] = field(default_factory=list)
    """What follows the training in a job of its own: evaluate, export, in this order."""

    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as --reservation=NAME."""

    def __post_init__(self) -> None:
        _positive("slurm", self, "max_restarts")
        if self.cpus_per_task is not None:
            _positive("slurm", self, "cpus_per_task")
        if self.time is not None and self.time.isdigit():
            # A file's 12:00:00 is 43200 to YAML, which would be minutes to Slurm.
            raise ValueError(
                f"slurm.time: found the number {self.time}, wanted days too, as in 0-12:00:00"
            )
        for step in self.then:
            _one_of("slurm.then", step, ("evaluate", "export"))
        for option in self.extra:
            if not option.startswith("-"):
                raise ValueError(
                    f"slurm.extra: found {option!r}, wanted --option or --option=value"
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    name: str
    """Folder of the run under `root`, and its name in MLflow."""

    model: LanguageModelConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig

    root: str = "runs"
    """Folder that holds the runs."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or "/" in self.name:
            raise ValueError(f"name: found {self.name!r}, wanted the name of one folder")
        for key in ("name", "root"):  # scripts and Slurm take them line by line
            if any(ord(character) < 32 for character in getattr(self, key)):
                raise ValueError(f"{key}: found {getattr(self, key)!r}, wanted one line of text")
        self._check_divisibility()
        if self.data.context % self.trainer.context_parallel:
            raise ValueError(
                f"trainer.context_parallel: found {self.trainer.context_parallel}, wanted a "
                f"divisor of data.context = {self.data.context}"
            )
        for asking, is_asked in (
            ("slurm.then evaluate", "evaluate" in self.slurm.then),
            ("evaluation.tasks", bool(self.evaluation.tasks)),
        ):
            if is_asked and self.data.validation_manifest is None:
                raise ValueError(
                    f"data.validation_manifest: missing with {asking}, wanted shards to evaluate on"
                )
        if self.trainer.train_only is not None and self.trainer.start_from is None:
            raise ValueError(
                "trainer.start_from: missing with trainer.train_only, which would freeze random "
                "weights; wanted a run or checkpoint"
            )
        if self.trainer.train_only is not None and not self._has_learned_initial_state():
            raise ValueError(
                "trainer.train_only: found 'initial_state' with model.attention.initial_state "
                "'zero' in every layer, wanted null, or model.attention.initial_state learned"
            )

    @property
    def samples_per_update(self) -> int:
        return self.optim.tokens_per_update // self.data.context

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank runs for one update."""
        return self.samples_per_update // (self.trainer.micro_batch * self.trainer.data_ranks)

    @property
    def num_updates(self) -> int:
        """Updates in the budget; the last may go beyond it by less than one update."""
        return -(-self.trainer.max_tokens // self.optim.tokens_per_update)

    def _has_learned_initial_state(self) -> bool:
        attentions = map(self.model.attention_of, range(self.model.layers))
        return any(getattr(one, "initial_state", "zero") == "learned" for one in attentions)

    def _check_divisibility(self) -> None:
        tokens, context = self.optim.tokens_per_update, self.data.context
        ranks, micro = self.trainer.data_ranks, self.trainer.micro_batch
        unit = context * ranks * micro
        if tokens % unit == 0:
            return
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        choices = f"{below} or {above}" if below else f"{above}"
        message = (
            f"optim.tokens_per_update: found {tokens}, wanted a multiple of {unit} (data.context "
            f"{context} x trainer.micro_batch {micro} x {ranks} ranks); change it to {choices}"
        )
        fitting = [size for size in range(micro, 0, -1) if tokens % (context * ranks * size) == 0]
        if fitting:
            message += f", or trainer.micro_batch to {fitting[0]}"
        raise ValueError(message)


def _one_of(path: str, found: str, wanted: tuple[str, ...]) -> None:
    if found not in wanted:
        raise ValueError(f"{path}: found {found!r}, wanted one of {', '.join(wanted)}")


def _positive(part: str, config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{part}.{name}: found {getattr(config, name)}, wanted 1 or more")
