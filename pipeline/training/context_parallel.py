"""Parts of a sequence on the ranks of a process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Every tensor begins at a multiple of this in the buffer that is sent, so that it can be viewed.
_ALIGNMENT = 16


class ContextParallel:
    """The sequence parts (modules/sequence_parts.py) of a group's ranks, in their order.

    One collective carries all tensors of a call, as bytes, whatever their dtypes. Autograd runs
    backward in the reverse order of the forward pass wherever the graph is the same, which
    `SequenceParts` asks for, so collectives meet there as well; those that activation checkpointing
    repeats are repeated by every rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.bytes_sent = 0
        """Handed to other ranks so far: every tensor once forward, and backward each rank's."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor of all ranks, (count, *shape); gradients are summed over all ranks' use."""
        return _Gather.apply(self, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def all_gather(self, mine: Tensor) -> Tensor:
        """(bytes,) of every rank, (count, bytes)."""
        every = mine.new_empty(self.count, mine.numel())
        dist.all_gather(list(every), mine, group=self.group)
        self.bytes_sent += mine.numel()
        return every

    def all_to_all(self, for_each: Tensor) -> Tensor:
        """Row r to rank r, for row r of rank r: both (count, bytes)."""
        from_each = torch.empty_like(for_each)
        dist.all_to_all_single(from_each.view(-1), for_each.view(-1), group=self.group)
        self.bytes_sent += (self.count - 1) * for_each.shape[1]
        return from_each


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: ContextParallel, *tensors: Tensor) -> tuple[Tensor, ...]:
        # SavedCheckpoint: nothing but sizes.
        ctx.parts = parts
        ctx.like = [(x.shape, x.dtype) for x in tensors]
        mine = _pack([x[None] for x in tensors], ctx.like)
        return tuple(_unpack(parts.all_gather(mine[0]), ctx.like))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        like = [one for one, need in zip(ctx.like, needs, strict=True) if need]
        wanted = [x for x, need in zip(gradients, needs, strict=True) if need]
        # Exchanged and then summed in the order of ranks: a backend's own reduction keeps to no
        # order and takes one dtype at a time.
        from_each = ctx.parts.all_to_all(_pack(wanted, like))
        sums = iter(x.sum(dim=0) for x in _unpack(from_each, like))
        return None, *(next(sums) if need else None for need in needs)


_Like = list[tuple[torch.Size, torch.dtype]]


def _pack(tensors: list[Tensor], like: _Like) -> Tensor:
    """Tensors (rows, *shape), of the shapes and dtypes given, side by side: (rows, bytes)."""
    size = sum(_aligned_bytes(*one) for one in like)
    rows = tensors[0].new_zeros(tensors[0].shape[0], size, dtype=torch.uint8)
    for place, x in zip(_unpack(rows, like), tensors, strict=True):
        place.copy_(x)
    return rows


def _unpack(rows: Tensor, like: _Like) -> list[Tensor]:
    """The same memory as tensors (rows, *shape)."""
    tensors, start = [], 0
    for shape, dtype in like:
        piece = rows[:, start : start + shape.numel() * dtype.itemsize].view(dtype)
        tensors.append(piece.unflatten(1, shape) if shape else piece[:, 0])
        start += _aligned_bytes(shape, dtype)
    return tensors


def _aligned_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
