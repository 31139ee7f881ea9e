"""What Slurm says of jobs."""

import re
from collections.abc import Mapping

from longhaul.pipeline.finding import output_of


def slurm_job(job_id: str) -> Mapping[str, str]:
    """The fields of a job, such as JobState; none without Slurm, or where it has forgotten it."""
    text = output_of("scontrol", "show", "job", "-o", job_id) or ""
    line = text.partition("\n")[0]
    return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line))
