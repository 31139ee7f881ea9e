"""The Slurm that tests run jobs on is one."""

import time
from pathlib import Path
from typing import Any

import pytest


def test_two_nodes_answer_by_their_names(cluster: Any) -> None:
    done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2"]


def test_a_signal_before_the_end_reaches_a_task(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        '#!/bin/sh\nsrun sh -c \'trap "echo told; exit 75" USR1; echo up; '
        "while :; do sleep 0.1; done'\nexit $?\n"
    )
    job = cluster.submit("--ntasks=1", f"--output={tmp_path}/out", str(script))
    _wait_for_text(cluster, job, "up")
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait(job, "FAILED")["ExitCode"] == "75:0"
    assert "told" in cluster.output(job)


@pytest.mark.wide
def test_the_job_of_a_crashed_node_runs_again(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nhostname\n[ -z $SLURM_RESTART_COUNT ] && sleep 600; exit 0\n")
    options = ("--nodelist=node2", "--requeue", "--open-mode=append", f"--output={tmp_path}/out")
    job = cluster.submit(*options, str(script))
    _wait_for_text(cluster, job, "node2")
    cluster.crash("node2")
    assert not cluster.processes("node2")
    cluster.wait(job, "PENDING")
    cluster.start("node2")
    assert cluster.wait(job, "COMPLETED")["Restarts"] == "1"
    assert cluster.output(job).split() == ["node2", "node2"]


def test_a_job_gets_the_gpus_and_features_of_its_nodes(make_cluster: Any) -> None:
    cluster = make_cluster(nodes=4, cpus=16, gpus=8, gpu_type="h100", extra="Feature=hbm")
    wanted = ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--constraint=hbm")
    done = cluster.run("srun", *wanted, "sh", "-c", "echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES")
    ranks = dict(line.split() for line in done.stdout.splitlines())
    assert sorted(map(int, ranks)) == list(range(32))
    assert set(ranks.values()) == {"0,1,2,3,4,5,6,7"}


def _wait_for_text(cluster: Any, job: str, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in cluster.output(job):
        assert time.monotonic() < deadline, cluster.job(job)
        time.sleep(0.1)
