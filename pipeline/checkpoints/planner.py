"""Plans which rank writes which tensors of a checkpoint.

At every save torch gathers the plans of all ranks on the first one, which removes what several of
them hold, and sends each its own back. For 1,024 ranks of 777 tensors that is 159 MB, and more than
a minute of its time. The tensors of a run are the same at each save, so the ranks plan once, and
again only when one has other tensors. They send what planning needs, and get positions back.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from longhaul.pipeline.checkpoints.together import gather


@dataclass
class SavePlans:
    """What the last save was planned to write, for the next one."""

    local: SavePlan = field(default_factory=lambda: SavePlan([]))
    """All that this rank holds."""
    agreed: SavePlan = field(default_factory=lambda: SavePlan([]))
    """Of that, what this rank writes; `storage_data` is its rank."""
    num_bytes: int = 0
    """Bytes that all ranks write together; known to the first one."""


class HeldShard(NamedTuple):
    """What the first rank is told of a shard that a rank holds; a whole tensor is one, too."""

    name: str
    offset: tuple[int, ...]
    num_bytes: int
    num_tensor_bytes: int


class Planner(DefaultSavePlanner):
    """Plans one save. Its metadata is empty, because torch would send it to all ranks."""

    def __init__(self, plans: SavePlans, group: dist.ProcessGroup | None) -> None:
        """`plans` are of the save before; finish_plan changes them to those of this one."""
        super().__init__(flatten_state_dict=False)
        self.num_bytes = plans.num_bytes
        """Bytes that all ranks write together; known to the first one."""
        self._plans = plans
        self._group = group
        self._local = SavePlan([])
        self._is_new = True

    def create_local_plan(self) -> SavePlan:
        is_new = True
        try:
            self._local = super().create_local_plan()
            is_new = self._local != self._plans.local
        finally:  # The other ranks wait here for one that failed, too.
            self._is_new = any(gather(self._group, is_new))
        shards = [_shard(item) for item in self._local.items] if self._is_new else None
        return SavePlan([], planner_data=shards)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._is_new:
            shards = [plan.planner_data for plan in all_plans]
            self.num_bytes = check_whole(shards)
            all_plans = [
                SavePlan([], storage_data=rank, planner_data=positions)
                for rank, positions in enumerate(share_out(shards))
            ]
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self._is_new:
            items = [self._local.items[position] for position in new_plan.planner_data]
            self._plans.local = self._local
            self._plans.agreed = replace(new_plan, items=items, planner_data=None)
            self._plans.num_bytes = self.num_bytes
        return self._plans.agreed


def share_out(shards: Sequence[Sequence[HeldShard]]) -> list[list[int]]:
    """Positions in each rank's shards of what it writes.

    Of the ranks that hold a shard, the one with the fewest bytes to write until then gets it.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, own in enumerate(shards):
        for position, shard in enumerate(own):
            holders[shard.name, shard.offset].append((rank, position))
    planned: list[list[int]] = [[] for _ in shards]
    num_bytes = [0] * len(shards)
    for held in holders.values():
        rank, position = min(held, key=lambda one: num_bytes[one[0]])
        planned[rank].append(position)
        num_bytes[rank] += shards[rank][position].num_bytes
    return [sorted(positions) for positions in planned]


def check_whole(shards: Sequence[Sequence[HeldShard]]) -> int:
    """The bytes of all tensors together.

    Raises:
        ValueError: the shards of a tensor are not as many bytes as the tensor, or ranks say
            different things of a shard. That shards overlap is not looked for.
    """
    held: dict[tuple[str, tuple[int, ...]], HeldShard] = {}
    found: dict[str, int] = defaultdict(int)
    wanted: dict[str, int] = {}
    for own in shards:
        for shard in own:
            known = held.setdefault((shard.name, shard.offset), shard)
            if known is shard:
                found[shard.name] += shard.num_bytes
                wanted[shard.name] = shard.num_tensor_bytes
            elif known != shard:
                raise ValueError(
                    f"{shard.name}: found {known.num_bytes:,} bytes at {list(shard.offset)} on one "
                    f"rank and {shard.num_bytes:,} on another, wanted equal copies"
                )
    for name, num_bytes in found.items():
        if num_bytes != wanted[name]:
            raise ValueError(
                f"{name}: found shards of {num_bytes:,} bytes on all ranks together, wanted "
                f"{wanted[name]:,} bytes"
            )
    return sum(wanted.values())


def _shard(item: WriteItem) -> HeldShard:
    assert item.tensor_data is not None
    num_tensor_bytes = item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize
    offset = tuple(item.index.offset or ())
    return HeldShard(item.index.fqn, offset, bytes_of(item), num_tensor_bytes)


def bytes_of(item: WriteItem) -> int:
    """Bytes of the tensor that an item writes."""
    assert item.tensor_data is not None
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)
