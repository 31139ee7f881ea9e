"""What Slurm says of jobs."""

import json
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from longhaul.pipeline.system.programs import output_of

JOBS_FILE = "slurm/jobs.jsonl"
"""In a run folder: a line for each job that was queued for it."""

_SECONDS = 20.0  # A controller with thousands of jobs in its queue takes some.
# Job, state, restarts, and a reason, which may have spaces in it.
_FORMAT = "JobArrayID:64,State:32,RestartCnt:16,Reason:256"
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
}


class SlurmJob(NamedTuple):
    """What squeue says of a job."""

    state: str
    restarts: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED


def training_jobs(run: Path) -> Sequence[str]:
    """Ids of the jobs that were submitted to train a run, the last one last."""
    ids = []
    try:
        lines = (run / JOBS_FILE).read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["kind"] == "train":
                ids.append(str(entry["job_id"]))
        except (ValueError, LookupError, TypeError):
            continue  # half a line, of a submission that was interrupted
    return ids


def slurm_jobs(job_ids: Collection[str]) -> Mapping[str, SlurmJob] | None:
    """Those of the jobs that Slurm has not forgotten, by id; None where it does not answer."""
    ids = f"--jobs={','.join(job_ids)}"
    command = ["squeue", "--noheader", "--array", "--states=all", ids, f"--Format={_FORMAT}"]
    # A user's own defaults might leave some out.
    environment = {key: value for key, value in os.environ.items() if key[:7] != "SQUEUE_"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # What it says of a single job that it has forgotten; of several it leaves that one out.
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    rows = (line.split(maxsplit=3) for line in done.stdout.splitlines())
    return {row[0]: SlurmJob(*(field.strip() for field in row[1:])) for row in rows}


def slurm_job(job_id: str) -> Mapping[str, str]:
    """The fields of a job, such as EndTime; none without Slurm, or where it has forgotten it."""
    text = output_of("scontrol", "show", "job", "-o", job_id) or ""
    line = text.partition("\n")[0]
    return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line))
