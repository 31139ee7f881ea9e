"""Context parallelism, as the model sees it: one rank's part of a sequence, and its collectives.

A sequence is split into equal contiguous parts, one per rank. A rank sees the tokens of its own
part only.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SequencePart(Protocol):
    """Which part of the sequence this rank holds, and the collectives that connect the ranks.

    All ranks must call `gather`, `gather_before` and `exchange` equally often, in the same order
    and with the same shapes. So whether they are called must never depend on where documents begin
    in a part.
    """

    index: int
    """This part, counted from 0 along the sequence."""

    count: int
    """Number of parts."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of all parts, (count, *shape).

        The gradient of a rank's tensor is the sum over all ranks that used it.
        """

    def gather_before(self, reach: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of the last `reach` parts before this one, (parts, *shape).

        There are fewer at the start of the sequence, before the first part none. Gradients are
        those of `gather`.
        """

    def exchange(
        self, sent: Sequence[int], received: Sequence[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The rows that all parts send to this one, in the order of parts.

        The next sent[r] rows of each tensor go to part r, and received[r] rows come from it.
        Gradients return to the part that sent the row.
        """
