"""A sequence in equal contiguous parts, each mixed by a caller that sees no other part's tokens."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SequenceParts(Protocol):
    """Which part this is, and the one way in which parts hear of each other.

    All parts call `gather` equally often, in the same order and with the same shapes, which is why
    nothing that a part's documents decide may decide whether it is called.
    """

    index: int
    """This part, counted from 0 along the sequence."""

    count: int
    """Number of parts."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of all parts, (count, *shape); gradients are summed over all parts' use."""
