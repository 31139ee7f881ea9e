"""What a training run's checkpoint holds beside tensors."""

from dataclasses import dataclass

from longhaul.modules.progress import Progress

_MOST = 1 << 60


@dataclass(frozen=True)
class TrainingState:
    """The part of state.json that is read again."""

    progress: Progress
    shards_sha256: str
    """Digest of the hashes of all training shards."""

    def __post_init__(self) -> None:
        for name in ("step", "samples", "tokens", "skipped_in_a_row"):
            value = getattr(self.progress, name)
            if not 0 <= value <= _MOST:
                raise ValueError(f"progress.{name}: found {value:.3g}, wanted 0 to {_MOST}")
