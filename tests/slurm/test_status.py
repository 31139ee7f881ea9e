"""`longhaul status` of runs that were submitted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

_CODE = "import sys; from longhaul.pipeline.cli import main; sys.exit(main(sys.argv[1:]))"


def _submitted(cluster: Any, root: Path, name: str, *options: str) -> str:
    """A run folder whose journal nobody wrote, and a job that is noted in it."""
    command = ("--output=/dev/null", "--requeue", *options, "--wrap=sleep 600")
    job: str = cluster.submit(*command)
    (root / name / "slurm").mkdir(parents=True)
    lines = [{"job_id": job, "kind": "train"}, {"job_id": "999999", "kind": "evaluate"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / name / "slurm" / "jobs.jsonl").write_text(text)
    return job


@pytest.mark.wide
def test_states_and_restarts_come_from_slurm(cluster: Any, tmp_path: Path) -> None:
    jobs = {"running": _submitted(cluster, tmp_path, "running", "--nodelist=node1")}
    jobs["waiting"] = _submitted(cluster, tmp_path, "waiting", "--begin=now+1hour")
    jobs["restarted"] = _submitted(cluster, tmp_path, "restarted", "--nodelist=node2")
    jobs["cancelled"] = _submitted(cluster, tmp_path, "cancelled")
    for name in ("running", "restarted", "cancelled"):
        cluster.wait(jobs[name], "RUNNING")
    cluster.run("scancel", jobs["cancelled"])
    cluster.wait(jobs["cancelled"], "CANCELLED")
    cluster.down("node2")
    cluster.wait(jobs["restarted"], "PENDING")
    cluster.resume("node2")
    cluster.wait(jobs["restarted"], "RUNNING")
    done = cluster.run(sys.executable, "-P", "-c", _CODE, "status", str(tmp_path))
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert {name: rows[name][1] for name in jobs} == jobs
    assert rows["running"][2] == "running"
    assert rows["running"][8] == "0"
    assert rows["waiting"][2:4] == ["pending,", "BeginTime"]
    assert rows["restarted"][2] == "running"
    assert rows["restarted"][8] == "1"
    assert rows["cancelled"][2] == "cancelled"
    # Of a single job that it does not know Slurm says something else than of one of several.
    (tmp_path / "alone" / "forgotten" / "slurm").mkdir(parents=True)
    note = '{"job_id": "999999", "kind": "train"}\n'
    (tmp_path / "alone" / "forgotten" / "slurm" / "jobs.jsonl").write_text(note)
    done = cluster.run(sys.executable, "-P", "-c", _CODE, "status", str(tmp_path / "alone"))
    assert done.stdout.splitlines()[1].split()[:4] == ["forgotten", "999999", "not", "started"]
    assert done.stderr == ""
