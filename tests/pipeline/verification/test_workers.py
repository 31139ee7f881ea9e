"""Jobs in processes of their own: a crash, a hang or an exception ends one job only."""

import time
from collections import deque
from pathlib import Path

import pretended_checks as pretended
import psutil

from longhaul.pipeline.verification.workers import Job, Outcome, _admitted, run_jobs


def run(*jobs: Job, num_processes: int = 1, deadline: float = 120) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    run_jobs(
        jobs,
        num_processes=num_processes,
        deadline=time.monotonic() + deadline,
        ended=outcomes.__setitem__,
    )
    return outcomes


def has_ended(pid: int) -> bool:
    # Who adopts it may not have taken notice of its end yet.
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_happens_to_one_job_does_not_stop_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    jobs = [
        Job(pretended.process_id, (0, None), 60),
        Job(pretended.process_id, (0, None), 60),
        Job(pretended.crashes, (0, None), 60),
        Job(pretended.raises, (0, None), 60),
        Job(pretended.hangs, (str(child), None), 3),
        Job(pretended.process_id, (0, None), 60),
    ]
    outcomes = run(*jobs)
    first, second, crashed, raised, late, last = (outcomes[number] for number in range(6))
    assert first.result == second.result != last.result
    assert crashed[:2] == ("crashed", "its process was killed by SIGSEGV")
    assert raised.status == "raised"
    assert raised.result.startswith("RuntimeError: CUDA error: an illegal memory access")
    assert late[:2] == ("timed out", "took longer than 3 s")
    assert has_ended(int(child.read_text())), "what a job started ends with it"
    assert last.status == "returned"


def test_at_the_deadline_nothing_more_is_told() -> None:
    started = time.monotonic()
    assert run(Job(pretended.hangs, (None, None), 600), deadline=1) == {}
    assert time.monotonic() - started < 60
    assert run(Job(pretended.process_id, (0, None), 60), deadline=-1) == {}


def test_jobs_wait_for_memory() -> None:
    jobs = [Job(print, (), 60, gigabytes) for gigabytes in (30, 20, 40, 500, 1)]

    def admitted(waiting: list[int], running: list[int]) -> list[int]:
        return _admitted(jobs, deque(waiting), running, num_processes=12, gigabytes=68)

    assert admitted([0, 1, 2, 3, 4], []) == [0, 1]
    assert admitted([2, 3, 4], [1]) == [2]
    assert admitted([3, 4], [2]) == []
    assert admitted([3, 4], []) == [3], "alone, and it may fail"
