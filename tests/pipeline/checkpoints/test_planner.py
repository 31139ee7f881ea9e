"""Which rank writes which tensors: what torch plans, sent once."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from longhaul.pipeline.checkpoints.planner import Planner, SavePlans

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


def test_each_rank_writes_what_torch_plans_and_sends_its_plan_once() -> None:
    plans = [SavePlans() for _ in range(RANKS)]
    sent, written = _agree(_planners(plans))
    wanted, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(sent)
    assert [plan.items for plan in written] == [plan.items for plan in wanted]
    assert all(plan.items for plan in written)
    assert [plan.storage_data for plan in written] == [0, 1, 2]
    assert plans[0].num_bytes == 4 * 120 + 5

    sent_again, written_again = _agree(_planners(plans))
    assert [plan.items for plan in sent_again] == [[]] * RANKS
    assert written_again == written
    assert plans[0].num_bytes == 4 * 120 + 5
