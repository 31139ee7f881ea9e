"""How far a run has got, and which updates it skips.

An update is skipped if its loss is not finite or is a spike, as decided here, or if the norm of its
gradients is not finite. The latter is found where gradients are clipped, by the strategy
(modules/pretraining.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal

# With fewer losses, their standard deviation is too uncertain to detect spikes.
_MIN_LOSSES_FOR_SPIKES = 20


@dataclass
class Skip:
    """An update that did not change the parameters."""

    step: int
    first_sample: int  # index of the update's first sample in the data stream
    last_sample: int
    is_spike: bool  # if False, the loss or the gradient was not finite
    rewound_to: int | None = None  # step of the checkpoint whose weights were restored


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


def reason_to_skip(
    loss: float, recent_losses: Sequence[float], spike_sigma: float | None
) -> Literal["spike", "not finite"] | None:
    """Why an update with this loss must be skipped; None if its loss is good.

    An infinite loss counts as a spike while spikes are detected.

    Args:
        loss: of the update, nats per token.
        recent_losses: of the updates before it that were not skipped.
        spike_sigma: a spike is a loss more than this many standard deviations above the mean of
            the recent losses. None detects no spikes.
    """
    limit = math.inf
    if spike_sigma is not None and len(recent_losses) >= _MIN_LOSSES_FOR_SPIKES:
        limit = fmean(recent_losses) + spike_sigma * pstdev(recent_losses)
    if loss > limit:
        return "spike"
    return None if math.isfinite(loss) else "not finite"
