"""Plans which rank writes which tensors of a checkpoint.

At every save torch gathers the plans of all ranks on the first one, which removes what several of
them hold, and sends each its own back: minutes of Python at 1,024 ranks. The tensors of a run are
the same at each save, so the ranks plan once, and again only when one has other tensors.
"""

from dataclasses import dataclass, field, replace

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


class Planner(DefaultSavePlanner):
    """Plans one save. Its metadata is empty, because torch would send it to all ranks."""

    def __init__(self, plans: SavePlans, group: dist.ProcessGroup | None) -> None:
        """`plans` are of the save before; finish_plan changes them to those of this one."""
        super().__init__(flatten_state_dict=False)
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
        return self._local if self._is_new else SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not self._is_new:
            return all_plans, Metadata({})
        written, _ = super().create_global_plan(all_plans)
        self._plans.num_bytes = sum(bytes_of(item) for plan in written for item in plan.items)
        pairs = zip(all_plans, written, strict=True)
        return [_positions(*pair, rank) for rank, pair in enumerate(pairs)], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self._is_new:
            items = [self._local.items[position] for position in new_plan.planner_data]
            self._plans.local = self._local
            self._plans.agreed = replace(new_plan, items=items, planner_data=None)
        return self._plans.agreed


def _positions(local: SavePlan, written: SavePlan, rank: int) -> SavePlan:
    """Positions in a rank's plan of what it is to write; they are sent faster than the items."""
    kept = {item.index for item in written.items}
    positions = [place for place, item in enumerate(local.items) if item.index in kept]
    return SavePlan([], storage_data=rank, planner_data=positions)


def bytes_of(item: WriteItem) -> int:
    """Bytes of the tensor that an item writes."""
    assert item.tensor_data is not None
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)
