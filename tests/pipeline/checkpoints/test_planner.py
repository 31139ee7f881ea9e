"""Which rank writes which tensors, agreed once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from longhaul.pipeline.checkpoints.planner import (
    HeldShard,
    Planner,
    SavePlans,
    check_whole,
    share_out,
)

RANKS = 3


def _tensors(rank: int) -> dict[str, Tensor]:
    """Plain tensors, each to be written by one of those that hold it; rank 0 has one more."""
    sizes = {"model/a": 40, "model/b": 9, "optimizer/a/m": 40, "optimizer/a/step": 1, "model/c": 30}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    return tensors if rank else tensors | {"rng/torch": torch.zeros(5, dtype=torch.uint8)}


def _planners(plans: list[SavePlans]) -> list[Planner]:
    planners = [Planner(own, None) for own in plans]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(_tensors(rank), is_coordinator=rank == 0)
    return planners


def _agree(planners: list[Planner]) -> tuple[list[SavePlan], list[SavePlan]]:
    """The plans that the ranks sent, and those by which they write."""
    sent = [planner.create_local_plan() for planner in planners]
    back, _ = planners[0].create_global_plan(sent)
    return sent, [one.finish_plan(plan) for one, plan in zip(planners, back, strict=True)]


def test_plain_tensors_are_shared_out_as_by_torch_and_plans_are_sent_once() -> None:
    plans = [SavePlans() for _ in range(RANKS)]
    _, written = _agree(_planners(plans))
    held = [own.local for own in plans]
    wanted, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(held)
    assert [plan.items for plan in written] == [plan.items for plan in wanted]
    assert all(plan.items for plan in written)
    assert [plan.storage_data for plan in written] == [0, 1, 2]
    assert plans[0].num_bytes == 4 * 120 + 5

    sent_again, written_again = _agree(_planners(plans))
    assert sent_again == [SavePlan([])] * RANKS
    assert written_again == written
    assert plans[0].num_bytes == 4 * 120 + 5


def test_a_save_that_failed_leaves_the_bytes_of_the_one_before() -> None:
    plans = [SavePlans() for _ in range(RANKS)]
    _agree(_planners(plans))
    planners = [Planner(own, None) for own in plans]
    for planner in planners:
        planner.set_up_planner({"model/a": torch.zeros(1000)})
    planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    assert planners[0].num_bytes == 4000
    again = _planners(plans)
    again[0].create_global_plan([planner.create_local_plan() for planner in again])
    assert again[0].num_bytes == 4 * 120 + 5


def test_copies_of_shards_are_shared_out_by_bytes() -> None:
    # Two halves, each on two ranks as with replicas, and a number that all hold.
    def held(half: int) -> list[HeldShard]:
        return [HeldShard("w", (8 * half, 0), 64, 128), HeldShard("step", (), 4, 4)]

    shards = [held(0), held(1), held(0), held(1)]
    assert share_out(shards) == [[0], [1], [], [0]]
    assert check_whole(shards) == 132


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([("w", (0,), 64, 128), ("w", (0,), 64, 128)], "w: found shards of 64 bytes .* wanted 128"),
        ([("w", (0,), 64, 96), ("w", (8,), 64, 96)], "w: found shards of 128 bytes .* wanted 96"),
        ([("w", (0,), 64, 64), ("w", (0,), 32, 32)], r"w: found 64 bytes at \[0\] .* and 32 on"),
    ],
)
def test_shards_that_do_not_make_a_tensor_are_named(shards: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        check_whole([[HeldShard(*one)] for one in shards])


def test_an_empty_shard_is_held_by_ranks_beyond_the_last_row() -> None:
    shards = [[HeldShard("w", (0,), 8, 8)], [HeldShard("w", (2,), 0, 8)]]
    assert check_whole(shards) == 8
    assert share_out(shards) == [[0], [0]]
