"""How far a run has got."""

from dataclasses import dataclass, field

from longhaul.modules.skipped_updates import Skip


@dataclass
class Progress:
    """How far a run has got. Whatever can be derived from these values is not stored."""

    step: int = 0  # updates so far, skipped ones included
    samples: int = 0  # samples consumed so far: this is the whole state of the data stream
    tokens: int = 0
    skipped: list[Skip] = field(default_factory=list)
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)  # without those of skipped updates
