"""Which folders and configs are those of runs, which someone else may have made."""

import os
from pathlib import Path

# What a run folder holds. Beside one of these, a config.yaml may be someone else's: whoever made
# the folder may have left out what `has_run` looks for.
_ENTRIES = ("data", "logs", "checkpoints", "slurm", "evaluation", "mlflow_run_id")


ROOT = "runs"
"""Where runs are, unless their configs tell."""


def named_run(given: str | Path) -> tuple[Path, Path | None]:
    """The run folder that a path names, and the checkpoint if it is that of a checkpoint.

    Raises ValueError for anything else. Commands ask before they import torch.
    """
    path = Path(given).absolute()
    checkpoint = path if path.parent.name == "checkpoints" and path.is_dir() else None
    folder = path if checkpoint is None else path.parent.parent
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{given}: {_no_run(path, given)}")
    return folder, checkpoint


def _no_run(path: Path, given: str | Path) -> str:
    """What was found in place of a run folder, and what was wanted."""
    wanted = "wanted a run folder or one of its checkpoints"
    named = Path(ROOT, given)
    if not path.is_dir() and (named / "config.yaml").is_file():
        return f"found no such folder; the run of this name is {named}"
    if path.suffix in (".yaml", ".yml"):
        return f"found a config, {wanted}"
    return f"found no {'config.yaml' if path.exists() else 'such folder'}, {wanted}"


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
