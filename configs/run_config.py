"""The configuration of a run as a tree of frozen dataclasses, checked when it is built."""

from dataclasses import dataclass, field

from longhaul.configs.run_folders import ROOT
from longhaul.configs.schema import (
    CheckpointConfig,
    EvaluationConfig,
    SlurmConfig,
    TrackingConfig,
    TrainerConfig,
)
from longhaul.datamodules.config import DataConfig
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.optim import OptimConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    name: str
    """Name of the run in MLflow and of its folder under `root`, without `/` or line breaks."""

    model: LanguageModelConfig
    """Attention variant and shape of the model."""

    data: DataConfig
    """Shards to read, and the context."""

    optim: OptimConfig
    """Optimiser, learning rate, and tokens per update."""

    trainer: TrainerConfig
    """Token budget, devices, parallelism and precision."""

    root: str = ROOT
    """Folder that contains the folders of runs."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save checkpoints, and which of them to keep."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation tasks during training."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where MLflow stores the run."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What a job requests from Slurm."""

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or "/" in self.name:
            raise ValueError(f"name: found {self.name!r}, wanted the name of one folder")
        for key in ("name", "root"):  # scripts and Slurm read them line by line
            if any(ord(character) < 32 for character in getattr(self, key)):
                raise ValueError(f"{key}: found {getattr(self, key)!r}, wanted one line of text")
        self._check_divisibility()
        if self.optim.name == "muon" and self.trainer.strategy == "deepspeed":
            raise ValueError(
                "optim.name: found muon with trainer.strategy deepspeed, whose optimizer sees no "
                "matrices but flat parts of them; wanted adamw, or trainer.strategy fsdp"
            )
        contexts = {"data.context": self.data.context}
        for number, cut in enumerate(self.data.short_first):
            contexts[f"data.short_first.{number}.context"] = cut.context
        for key, context in contexts.items():
            if context % self.trainer.context_parallel:
                raise ValueError(
                    f"trainer.context_parallel: found {self.trainer.context_parallel}, wanted a "
                    f"divisor of {key} = {context}"
                )
        if self.data.context > (longest := self.model.learned_positions or self.data.context):
            raise ValueError(
                f"data.context: found {self.data.context}, wanted at most "
                f"model.learned_positions = {longest}"
            )
        for asking, is_asked in (
            ("slurm.then evaluate", "evaluate" in self.slurm.then),
            ("evaluation.tasks", bool(self.evaluation.tasks)),
        ):
            if is_asked and not self.data.manifests("validation_manifest"):
                raise ValueError(
                    f"data.validation_manifest: missing with {asking}, wanted shards to evaluate on"
                )
        if self.trainer.branch_from is not None and self.optim.schedule.name != "wsd":
            raise ValueError(
                "trainer.branch_from: found with optim.schedule.name "
                f"{self.optim.schedule.name}, wanted null, or wsd, which decays last"
            )
        has_weights = self.trainer.start_from is not None or self.trainer.branch_from is not None
        if self.trainer.train_only is not None and not has_weights:
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
        """Number of micro-batches of a rank per update."""
        return self.samples_per_update // (self.trainer.micro_batch * self.trainer.data_ranks)

    @property
    def num_updates(self) -> int:
        """Number of updates in the budget, which the last may exceed by less than one update.

        Larger updates count as several.
        """
        return self.optim.num_steps(self.trainer.max_tokens)

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
        # Blocks usually have a power of two of tokens, which another context cannot divide.
        power = 1 << (context.bit_length() - 1)
        if tokens % context and power != context and tokens % (power * ranks * micro) == 0:
            raise ValueError(
                f"data.context: found {context} with optim.tokens_per_update {tokens}, which is no "
                f"multiple of {unit} (data.context x trainer.micro_batch {micro} x {ranks} ranks); "
                f"wanted data.context {power}, or optim.tokens_per_update {choices} "
                f"if {context} divides the blocks"
            )
        message = (
            f"optim.tokens_per_update: found {tokens}, wanted a multiple of {unit} (data.context "
            f"{context} x trainer.micro_batch {micro} x {ranks} ranks); change it to {choices}"
        )
        fitting = [size for size in range(micro, 0, -1) if tokens % (context * ranks * size) == 0]
        if fitting:
            message += f", or trainer.micro_batch to {fitting[0]}"
        raise ValueError(message)
