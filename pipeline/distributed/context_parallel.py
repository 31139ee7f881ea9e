"""Context parallelism: each rank of a process group holds one part of every sequence."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class ContextParallel:
    """The sequence parts (modules/sequence_part.py) of a group's ranks, in their order.

    One collective carries all tensors of a call, as bytes, whatever their dtypes. Autograd runs
    backward in the reverse order of the forward pass wherever the graph is the same, which
    `SequencePart` asks for, so collectives meet there as well; those that activation checkpointing
    repeats are repeated by every rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.bytes_sent = 0
        """Bytes sent so far, to all other ranks: forward each tensor, backward a gradient."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-gather each tensor to (count, *shape). Its gradient is summed over all ranks."""
        return _Gather.apply(self, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def gather_before(self, reach: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of the `reach` parts before this one, fewer at the start, (parts, *shape).

        A rank's gradient is summed over those that used its tensor.
        """
        return _GatherBefore.apply(self, reach, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def exchange(
        self, sent: Sequence[int], received: Sequence[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Send the next sent[r] rows of each tensor to rank r, and receive received[r] from it.

        Gradients return the same way.
        """
        return _Exchange.apply(self, sent, received, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def all_gather(self, mine: Tensor) -> Tensor:
        """All-gather (bytes,) to (count, bytes)."""
        every = mine.new_empty(self.count, mine.numel())
        # Into one tensor: NCCL would gather a list of them into one of its own, and copy it.
        dist.all_gather_into_tensor(every.view(-1), mine, group=self.group)
        self.bytes_sent += (self.count - 1) * mine.numel()
        return every

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the next sent[r] rows to rank r, for each r, and receive received[r] rows from it.

        Rows are (n, bytes); those received are in the order of ranks.
        """
        size = rows.shape[1]
        found = rows.new_empty(sum(received), size)
        splits = [n * size for n in received], [n * size for n in sent]
        dist.all_to_all_single(found.view(-1), rows.view(-1), *splits, group=self.group)
        self.bytes_sent += (sum(sent) - sent[self.index]) * size
        return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: ContextParallel, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Saved: nothing but sizes.
        ctx.parts = parts
        ctx.layout = [(x.shape, x.dtype) for x in tensors]
        mine = _pack([x[None] for x in tensors], ctx.layout)
        return tuple(_unpack(parts.all_gather(mine[0]), ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        once = [1] * ctx.parts.count
        needs = ctx.needs_input_grad[1:]
        found = _sent_back(ctx.parts, gradients, needs, ctx.layout, once, once)
        return None, *_summed(found)


class _GatherBefore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: ContextParallel, reach: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        index = parts.index
        ctx.parts = parts
        ctx.layout = [(x.shape, x.dtype) for x in tensors]
        ctx.before = [int(index - reach <= rank < index) for rank in range(parts.count)]
        ctx.after = [int(index < rank <= index + reach) for rank in range(parts.count)]
        mine = _pack([x[None] for x in tensors], ctx.layout)
        rows = mine.expand(sum(ctx.after), -1).contiguous()
        return tuple(_unpack(parts.all_to_all(rows, ctx.after, ctx.before), ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        layout, before, after = ctx.layout, ctx.before, ctx.after
        found = _sent_back(ctx.parts, gradients, needs, layout, before, after)
        return None, None, *_summed(found)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parts: ContextParallel,
        sent: Sequence[int],
        received: Sequence[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.parts, ctx.sent, ctx.received = parts, sent, received
        ctx.layout = [(x.shape[1:], x.dtype) for x in tensors]
        rows = parts.all_to_all(_pack(list(tensors), ctx.layout), sent, received)
        return tuple(_unpack(rows, ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        found = _sent_back(ctx.parts, gradients, needs, ctx.layout, ctx.received, ctx.sent)
        return None, None, None, *found


def _sent_back(
    parts: ContextParallel,
    gradients: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    layout: "_Layout",
    sent: Sequence[int],
    received: Sequence[int],
) -> list[Tensor | None]:
    """The rows of the gradient of each tensor that needs one, from the ranks that used it."""
    layout = [one for one, need in zip(layout, needs, strict=True) if need]
    wanted = [x for x, need in zip(gradients, needs, strict=True) if need]
    found = iter(_unpack(parts.all_to_all(_pack(wanted, layout), sent, received), layout))
    return [next(found) if need else None for need in needs]


def _summed(found: list[Tensor | None]) -> list[Tensor | None]:
    """In rank order: a reduce-scatter guarantees none, and takes one dtype at a time."""
    return [None if x is None else x.sum(dim=0) for x in found]


_Layout = list[tuple[torch.Size, torch.dtype]]


def _pack(tensors: list[Tensor], layout: _Layout) -> Tensor:
    """Tensors (rows, *shape), with the shapes and dtypes of the layout, as one (rows, bytes)."""
    rows = tensors[0].new_zeros(tensors[0].shape[0], sum(_sizes(layout)), dtype=torch.uint8)
    for place, x in zip(_unpack(rows, layout), tensors, strict=True):
        place.copy_(x)
    return rows


def _unpack(rows: Tensor, layout: _Layout) -> list[Tensor]:
    """Views of the buffer as tensors (rows, *shape)."""
    tensors, start = [], 0
    for (shape, dtype), size in zip(layout, _sizes(layout), strict=True):
        piece = rows[:, start : start + shape.numel() * dtype.itemsize].view(dtype)
        tensors.append(piece.unflatten(1, shape) if shape else piece[:, 0])
        start += size
    return tensors


def _sizes(layout: _Layout) -> list[int]:
    """Bytes of each tensor in a row, multiples of the widest number.

    A view as another dtype needs a start that is aligned to it.
    """
    widest = max(dtype.itemsize for _, dtype in layout)
    return [-(-shape.numel() * dtype.itemsize // widest) * widest for shape, dtype in layout]
