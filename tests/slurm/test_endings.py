"""How jobs end, and what follows: nothing, another start, the next of a chain, an evaluation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cluster = Any  # conftest.Cluster: modules of tests cannot import each other
Work = Any
Fault = Callable[[str, str], None]

ONE_TASK = [
    *("trainer.nodes=1", "trainer.devices=1", "trainer.strategy=single", "trainer.micro_batch=8")
]


@pytest.mark.wide
def test_a_job_that_fails_at_once_is_not_queued_again_and_nothing_follows(
    work: Work, fault: Fault
) -> None:
    fault("self.progress.step == 2", 'raise RuntimeError("no luck")')
    work.submit(*ONE_TASK, "slurm.then=[evaluate]")
    job, after = work.jobs()
    ended = work.cluster.wait(job, "FAILED", 120)
    assert (ended["ExitCode"], ended["Restarts"]) == ("1:0", "0")
    work.cluster.wait(after, "CANCELLED", 30)
    assert "train ended with status 1 on node" in work.said(job)
    assert "longhaul: no luck" in work.said(job)
    assert "not queued again: no checkpoint was added" in work.said(job)


@pytest.mark.wide
def test_a_job_that_fails_later_each_time_is_queued_again_until_its_limit(
    work: Work, fault: Fault
) -> None:
    # Each start gets ten updates further, with a checkpoint on the way.
    fault(
        "self.progress.step == 10 * (1 + int(os.environ.get('SLURM_RESTART_COUNT', '0')))",
        'raise RuntimeError("no luck")',
    )
    work.submit(*ONE_TASK, "slurm.max_restarts=1")
    (job,) = work.jobs()
    ended = work.cluster.wait(job, "FAILED", 180)
    assert (ended["ExitCode"], ended["Restarts"]) == ("1:0", "1")
    assert "steps 0 to 8" in work.said(job)
    assert "steps 8 to 16" in work.said(job)
    assert "not queued again: restarted 1 times, wanted 1 at most" in work.said(job)


@pytest.mark.wide
def test_bad_data_stops_a_chain_with_its_own_code(
    work: Work, corpus: Path, cluster: Cluster
) -> None:
    copy = work.path / "copy"
    shutil.copytree(corpus, copy)
    for shard in copy.glob("*.tar"):
        content = bytearray(shard.read_bytes())
        content[700] ^= 1
        shard.write_bytes(content)
    work.submit("--chain", "1", *ONE_TASK, "slurm.requeue=false", f"data.manifest={copy}")
    first, second = work.jobs()
    assert cluster.wait(first, "FAILED", 120)["ExitCode"] == "2:0"
    assert cluster.wait(second, "FAILED", 120)["ExitCode"] == "2:0"
    assert "sha256 is" in work.said(first)
    assert not (work.folder / "logs" / f"job-{second}-task-0.log").exists()


@pytest.mark.wide
def test_a_chain_goes_on_and_ends_with_the_run(work: Work, cluster: Cluster, fault: Fault) -> None:
    # The first job, and no other, waits for its signal; the one that finishes the run ends badly
    # after that.
    fault(
        "self.progress.step in (9, 39)",
        """
            import atexit
            is_over = lambda: requests.has_signal or os.path.exists("signalled")
            while self.progress.step == 9 and not is_over():
                time.sleep(0.05)
            if self.progress.step == 39:
                atexit.register(os._exit, 7)""",
    )
    options = ["slurm.requeue=false", "slurm.then=[evaluate,export]", *ONE_TASK]
    done = work.submit("--chain", "3", *options)
    assert done.stdout.count("job ") == 5
    first, second, third, fourth, after = work.jobs()
    refused = work.submit(check=False)
    assert refused.returncode == 1
    assert f"found job {first} in the queue, wanted none" in refused.stderr
    refused = work.submit("--after", "99999", check=False)
    assert refused.returncode == 2
    assert "--after: found 99999, wanted a job that Slurm knows" in refused.stderr
    work.wait_for_step(first, 8)
    cluster.run("scancel", "--signal=USR1", first)
    assert cluster.wait(first, "FAILED", 60)["ExitCode"] == "75:0"
    # The next one may come to that update too.
    (work.path / "signalled").touch()
    cluster.wait(second, "COMPLETED", 120)
    cluster.wait(third, "CANCELLED", 30)
    cluster.wait(fourth, "CANCELLED", 30)
    cluster.wait(after, "COMPLETED", 120)
    work.assert_one_clean_run()
    (results,) = (work.folder / "evaluation").glob("*/results.json")
    card = work.folder / "export" / "step-000000040" / "README.md"
    loss = json.loads(results.read_text())["evaluation/loss"]
    assert f"| evaluation/loss | {loss:.6g} |" in card.read_text()
