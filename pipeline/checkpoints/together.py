"""What the ranks that save or read a checkpoint together tell each other.

A group is the gloo process group of these ranks, and None for one process.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group, and the number of its ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def ask_first_rank(group: dist.ProcessGroup | None, question: Callable[[], T]) -> T:
    """Call `question` on the group's first rank, and return or raise its outcome on all ranks."""
    answer: list[Any] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            answer = [question()]
        except (OSError, ValueError) as error:
            answer = [error]
    if group is not None:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return cast(T, answer[0])


def gather(group: dist.ProcessGroup | None, own: T) -> list[T]:
    """What each rank gives, in their order, on all of them."""
    if group is None:
        return [own]
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, own, group=group)
    return of_all


def gather_on_first(group: dist.ProcessGroup | None, own: T) -> list[T]:
    """What each rank gives, in their order, on the first one; nothing on the others."""
    if group is None:
        return [own]
    of_all: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    dist.gather_object(own, of_all or None, group=group, group_dst=0)
    return of_all
