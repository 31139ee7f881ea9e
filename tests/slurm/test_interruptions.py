"""What may happen to a run of two nodes, and that it ends as if nothing had."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

Work = Any  # conftest.Work: modules of tests cannot import each other

NUM_UPDATES = 40
ONE_TASK_A_NODE = ("trainer.devices=1", "trainer.micro_batch=4")


@pytest.mark.wide
def test_two_nodes_of_two_tasks_train_to_the_end(work: Work) -> None:
    job = work.run()
    work.weights()
    work.assert_one_clean_run()
    folder = work.folder
    assert f"steps 0 to {NUM_UPDATES}" in (folder / "logs" / f"job-{job}.log").read_text()
    tasks = [folder / "logs" / f"job-{job}-task-{task}.log" for task in range(4)]
    assert all(task.exists() for task in tasks)
    for name in ("config.yaml", "train.sbatch", f"job-{job}.env"):
        assert (folder / "slurm" / name).stat().st_size
    assert (folder / "environment.json").exists()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("signal", "crash"), marks=pytest.mark.wide),
        pytest.param(
            ("signal", "signal", "administrator", "preemption", "node down", "crash"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_interruptions_lead_to_the_same_weights(
    names: tuple[str, ...],
    make_work: Callable[[], Work],
    work: Work,
    fault: Callable[[str, str], None],
) -> None:
    undisturbed = make_work()
    undisturbed.run(*ONE_TASK_A_NODE)
    # Each start waits within a backward pass for what ends it, and one rank sleeps on after that.
    start = "int(os.environ.get('SLURM_RESTART_COUNT', '0'))"
    fault(
        f"{start} < {len(names)} and self.progress.step == 5 * (1 + {start})",
        f"""
            while not requests.has_signal:
                time.sleep(0.05)
            if self.global_rank == 1 and {start} == 0:
                time.sleep(4)""",
    )
    work.submit(*ONE_TASK_A_NODE)
    (job,) = work.jobs()
    cluster = work.cluster

    def by_signal() -> None:
        cluster.run("scancel", "--signal=USR1", job)

    def by_administrator() -> None:
        cluster.run("scontrol", "requeue", job)

    def by_preemption() -> None:
        whole = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        cluster.wait(cluster.submit(*whole, "--wrap=true"), "COMPLETED", 60)

    def by_node_down() -> None:
        cluster.down("node2")
        cluster.resume("node2")

    def by_crash() -> None:
        cluster.crash("node2")
        cluster.wait(job, "PENDING", 60)
        cluster.start("node2")

    def times_saved() -> int:
        log = (work.folder / "logs" / f"job-{job}.log").read_text()
        return log.count("train ended with status 75")

    ways = {
        "signal": by_signal,
        "administrator": by_administrator,
        "preemption": by_preemption,
        "node down": by_node_down,
        "crash": by_crash,
    }
    for restarts, name in enumerate(names, start=1):
        work.wait_for_step(job, 5 * restarts)
        before = times_saved()
        ways[name]()
        deadline = time.monotonic() + 90
        while int(cluster.job(job)["Restarts"]) < restarts:
            assert time.monotonic() < deadline, f"{name}\n{work.said(job)}"
            time.sleep(0.1)
        # The others may leave no time to save.
        assert times_saved() == before + 1 or name not in ("signal", "preemption")
    # At times Slurm ends, and queues again, once more: it tells a node that came back of a job that
    # was killed there, and means the one of the same number that is running.
    cluster.wait(job, "COMPLETED", 240)
    found, wanted = work.weights(), undisturbed.weights()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    work.assert_one_clean_run()
