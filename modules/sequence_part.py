"""Context parallelism, as the model sees it: one rank's part of a sequence, and one collective.

A sequence is split into equal contiguous parts, one per rank. A rank sees the tokens of its own
part only.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SequencePart(Protocol):
    """Which part of the sequence this rank holds, and the collective that connects the ranks.

    All ranks must call `gather` equally often, in the same order and with the same shapes. So
    whether it is called must never depend on where documents begin in a part.
    """

    index: int
    """This part, counted from 0 along the sequence."""

    count: int
    """Number of parts."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of all parts, (count, *shape).

        The gradient of a rank's tensor is the sum over all ranks that used it.
        """
