"""Tasks in worker processes: a crash ends one task, the deadline ends the rest."""

import math
import os
import time

from longhaul.kernels.verify.processes import OUT_OF_TIME, run_tasks


def later(seconds: float = 120) -> float:
    return time.monotonic() + seconds


def test_problems_stay_with_their_task() -> None:
    for num_processes in (0, 2):
        outcomes = run_tasks(
            math.sqrt, [4.0, -1.0, 9.0, 16.0], num_processes=num_processes, deadline=later()
        )
        assert [outcome.result for outcome in outcomes] == [2.0, None, 3.0, 4.0]
        problem = outcomes[1].problem
        assert problem is not None
        assert problem.startswith("ValueError")


def test_a_process_that_dies_is_replaced() -> None:
    outcomes = run_tasks(os._exit, [3, 4], num_processes=1, deadline=later())
    problems = [outcome.problem for outcome in outcomes]
    assert problems == [f"the process died with exit code {code}" for code in (3, 4)]


def test_a_task_that_hangs_is_abandoned() -> None:
    started = time.monotonic()
    outcomes = run_tasks(time.sleep, [600, 600], num_processes=1, deadline=later(1))
    assert [outcome.problem for outcome in outcomes] == [OUT_OF_TIME] * 2
    assert time.monotonic() - started < 60


def test_nothing_starts_after_the_deadline() -> None:
    outcomes = run_tasks(math.sqrt, [4.0], num_processes=0, deadline=later(-1))
    assert outcomes[0].problem == OUT_OF_TIME
