"""Asks Slurm about jobs, and reads which jobs a run has."""

import contextlib
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from longhaul.datamodules.files.untrusted import parse_json, read_regular
from longhaul.pipeline.system.programs import output_of
from longhaul.pipeline.system.waiting import SQUEUE_S

JOBS_FILE = "slurm/jobs.jsonl"
"""In a run folder: one line for each job that was queued for the run."""

_MOST_BYTES = 16 << 20
# Job, state, restarts, and a reason, which may contain spaces.
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


@dataclass(frozen=True)
class _SubmittedJob:
    """One line of JOBS_FILE."""

    kind: str
    job_id: Annotated[str, Field(pattern="^[0-9]{1,20}(_[0-9]{1,20})?$")]


class SlurmJob(NamedTuple):
    """What squeue says about a job."""

    state: str
    restarts: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED


def training_jobs(run: Path) -> Sequence[str]:
    """Ids of the jobs that were submitted to train a run, oldest first."""
    try:
        lines = read_regular(run / JOBS_FILE, _MOST_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    ids = []
    for line in lines:
        # Half a line of an interrupted submission is left out.
        with contextlib.suppress(ValueError):
            entry = parse_json(_SubmittedJob, line, JOBS_FILE)
            if entry.kind == "train":
                ids.append(entry.job_id)
    return ids


def slurm_jobs(job_ids: Collection[str]) -> Mapping[str, SlurmJob] | None:
    """The jobs that Slurm still remembers, by id; None if it does not answer."""
    ids = f"--jobs={','.join(job_ids)}"
    command = ["squeue", "--noheader", "--array", "--states=all", ids, f"--Format={_FORMAT}"]
    # A user's own SQUEUE_ defaults might hide jobs.
    environment = {key: value for key, value in os.environ.items() if key[:7] != "SQUEUE_"}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SQUEUE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # squeue fails like this for one job that it has forgotten; of several, it omits that job.
    if result.returncode and "Invalid job id" not in result.stderr:
        return None
    rows = (line.split(maxsplit=3) for line in result.stdout.splitlines())
    return {row[0]: SlurmJob(*(field.strip() for field in row[1:])) for row in rows}


def slurm_job(job_id: str) -> Mapping[str, str]:
    """The fields of a job, such as EndTime; empty without Slurm, or if it has forgotten the job."""
    text = output_of("scontrol", "show", "job", "-o", job_id) or ""
    line = text.partition("\n")[0]
    return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line))
