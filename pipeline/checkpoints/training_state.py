"""What a training run's checkpoint holds beside tensors."""

from dataclasses import dataclass, field

from longhaul.datamodules.files.untrusted import Count
from longhaul.modules.progress import Progress, Skip


@dataclass
class SavedProgress(Progress):
    """A Progress of which nothing is missing: no field has a default, and counts are bounded."""

    step: Count = field()
    samples: Count = field()
    tokens: Count = field()
    skipped: list[Skip] = field()
    skipped_in_a_row: Count = field()
    recent_losses: list[float] = field()


@dataclass(frozen=True)
class TrainingState:
    """The part of state.json that is read again."""

    progress: SavedProgress
    shards_sha256: str
    """Digest of the hashes of all training shards, and of the sources' names and weights so far."""
    averaged_steps: list[Count] = field(default_factory=list)
    """Of a mean of checkpoints: their steps."""
