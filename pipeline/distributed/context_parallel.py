"""Context parallelism: each rank of a process group holds one part of every sequence."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# In the buffer that is sent, tensors start at multiples of this many bytes: a view as another dtype
# needs an aligned start.
_ALIGNMENT = 16


class Exchange(NamedTuple):
    """A collective that goes on beside other work until `wait` is called."""

    received: Tensor
    wait: Callable[[], object]


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

    def begin_gather(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to all-gather each tensor to (count, *shape); the result waits for them.

        Gradients are summed over all ranks. Their exchange begins in the backward pass of what used
        the gathered tensors, and is waited for in that of what made this rank's.
        """
        pending = _Pending(self, [(x.shape, x.dtype) for x in tensors])
        link = _Gather.apply(pending, *tensors)  # type: ignore[no-untyped-call]
        return lambda: _Gathered.apply(pending, link)  # type: ignore[no-untyped-call]

    def gather_before(self, reach: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of the `reach` parts before this one, fewer at the start, (parts, *shape).

        A rank's gradient is summed over those that used its tensor.
        """
        return _GatherBefore.apply(self, reach, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def all_gather(self, mine: Tensor) -> Exchange:
        """Begin to all-gather (bytes,) to (count, bytes)."""
        every = mine.new_empty(self.count, mine.numel())
        # Into one tensor: NCCL would gather a list of them into one of its own, and copy it.
        work = dist.all_gather_into_tensor(every.view(-1), mine, group=self.group, async_op=True)
        self.bytes_sent += (self.count - 1) * mine.numel()
        return Exchange(every, work.wait)

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Exchange:
        """Begin to send the next sent[r] rows to rank r, for each r, and to receive received[r].

        Rows are (n, bytes); those received are in the order of ranks.
        """
        size = rows.shape[1]
        found = rows.new_empty(sum(received), size)
        splits = [n * size for n in received], [n * size for n in sent]
        work = dist.all_to_all_single(
            found.view(-1), rows.view(-1), *splits, group=self.group, async_op=True
        )
        self.bytes_sent += (sum(sent) - sent[self.index]) * size
        return Exchange(found, work.wait)


class _Pending:
    """What a gather's two nodes of the graph share: the exchange that one begins, and one ends."""

    exchange: Exchange | None = None
    needs: tuple[bool, ...]  # whether a tensor needs a gradient

    def __init__(self, parts: ContextParallel, layout: "_Layout") -> None:
        self.parts = parts
        self.layout = layout

    def take_exchange(self) -> Exchange:
        """The graph does not keep what was received."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        return exchange


class _Gather(torch.autograd.Function):
    """Forward begins to gather tensors, backward waits for their gradients.

    The result is a number that only links this node to `_Gathered`, in both directions. It is on
    the device of the tensors: autograd runs the nodes of a device one after the other, the latest
    first, so that a wait comes as late as it can.
    """

    @staticmethod
    def forward(ctx: Any, pending: _Pending, *tensors: Tensor) -> Tensor:
        # Saved: nothing but sizes.
        ctx.pending = pending
        pending.needs = ctx.needs_input_grad[1:]
        mine = _pack([x[None] for x in tensors], pending.layout)
        pending.exchange = pending.parts.all_gather(mine[0])
        return mine.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pending = ctx.pending
        return None, *_received_back(pending.take_exchange(), pending.needs, pending.layout)


class _Gathered(torch.autograd.Function):
    """Forward waits for gathered tensors, backward begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, link: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        exchange = pending.take_exchange()
        exchange.wait()
        every = _unpack(exchange.received, pending.layout)
        ctx.mark_non_differentiable(
            *(x for x, need in zip(every, pending.needs, strict=True) if not need)
        )
        return tuple(every)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        pending = ctx.pending
        once = [1] * pending.parts.count
        pending.exchange = _begin_sending_back(
            pending.parts, gradients, pending.needs, pending.layout, once, once
        )
        return None, gradients[0].new_zeros((), dtype=torch.float32)


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
        exchange = parts.all_to_all(rows, ctx.after, ctx.before)
        exchange.wait()
        return tuple(_unpack(exchange.received, ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        exchange = _begin_sending_back(
            ctx.parts, gradients, needs, ctx.layout, ctx.before, ctx.after
        )
        return None, None, *_received_back(exchange, needs, ctx.layout)


def _begin_sending_back(
    parts: ContextParallel,
    gradients: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    layout: "_Layout",
    sent: list[int],
    received: list[int],
) -> Exchange:
    """Begin to exchange the gradients of tensors that need one, with the ranks that have them."""
    wanted = [x for x, need in zip(gradients, needs, strict=True) if need]
    return parts.all_to_all(_pack(wanted, _needed(layout, needs)), sent, received)


def _received_back(
    exchange: Exchange, needs: tuple[bool, ...], layout: "_Layout"
) -> list[Tensor | None]:
    """The gradient of each tensor that needs one, from the ranks that used it."""
    exchange.wait()
    # Exchanged and then summed in rank order, because a reduce-scatter guarantees no order and
    # takes one dtype at a time.
    sums = iter(x.sum(dim=0) for x in _unpack(exchange.received, _needed(layout, needs)))
    return [next(sums) if need else None for need in needs]


_Layout = list[tuple[torch.Size, torch.dtype]]


def _needed(layout: _Layout, needs: tuple[bool, ...]) -> _Layout:
    return [one for one, need in zip(layout, needs, strict=True) if need]


def _pack(tensors: list[Tensor], layout: _Layout) -> Tensor:
    """Tensors (rows, *shape), with the shapes and dtypes of the layout, as one (rows, bytes)."""
    size = sum(_aligned_bytes(*one) for one in layout)
    rows = tensors[0].new_zeros(tensors[0].shape[0], size, dtype=torch.uint8)
    for place, x in zip(_unpack(rows, layout), tensors, strict=True):
        place.copy_(x)
    return rows


def _unpack(rows: Tensor, layout: _Layout) -> list[Tensor]:
    """Views of the buffer as tensors (rows, *shape)."""
    tensors, start = [], 0
    for shape, dtype in layout:
        piece = rows[:, start : start + shape.numel() * dtype.itemsize].view(dtype)
        tensors.append(piece.unflatten(1, shape) if shape else piece[:, 0])
        start += _aligned_bytes(shape, dtype)
    return tensors


def _aligned_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
