"""How far a run has got."""

from dataclasses import dataclass, field

from longhaul.modules.skipped_updates import Skip


@dataclass
class Progress:
    """How far a run has got. Whatever can be derived from these values is not stored."""

    step: int = 0  # updates so far, skipped ones included; a larger one counts as several
    samples: int = 0  # samples consumed so far: this is the whole state of the data stream
    tokens: int = 0
    skipped: list[Skip] = field(default_factory=list)
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)  # without those of skipped updates


def is_passed(every: int, step: int, steps: int) -> bool:
    """Whether an update that counts as so many steps has reached a multiple of `every` steps.

    Args:
        every: 1 or more.
        step: of the run after the update.
        steps: of the update.
    """
    return step // every > (step - steps) // every
