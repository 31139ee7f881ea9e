"""Whether a config lies in the folder of a run, which someone else may have made."""

import os
from pathlib import Path

# What a run folder holds. Beside one of these, a config.yaml may be someone else's: whoever made
# the folder may have left out what `has_run` looks for.
_ENTRIES = ("data", "logs", "checkpoints", "slurm", "evaluation", "mlflow_run_id")


def run_folder_of(path: str | Path) -> Path | None:
    """The folder of the run to which a config belongs; None if it is the user's own words."""
    file = Path(os.path.abspath(os.path.expanduser(path)))
    if file.name == "config.yaml" and file.parent.name == "slurm":  # of a job
        return file.parent.parent
    folder = file.parent
    is_beside = any(os.path.lexists(folder / name) for name in _ENTRIES)
    return folder if has_run(folder) or (is_beside and file.name == "config.yaml") else None


def has_run(folder: Path) -> bool:
    """Whether a run was started in a folder, so that places in its config begin there."""
    marks = ("environment.json", "DONE", "logs/metrics.jsonl")
    is_begun = any(os.path.lexists(folder / name) for name in marks)
    return is_begun or any((folder / "checkpoints").glob("step-*"))
