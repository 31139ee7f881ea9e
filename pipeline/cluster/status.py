"""Shows the progress of the runs in a folder.

If `RUN/slurm/jobs.jsonl` names a job, Slurm is asked whether the run is running; otherwise the lock
on the run's journal shows it. Only the end of a journal is read, since it may be long.
"""

import contextlib
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from longhaul.configs.yaml_text import parse_yaml
from longhaul.datamodules.files.locks import is_locked
from longhaul.datamodules.files.untrusted import one_line, open_regular, read_regular
from longhaul.pipeline.cluster.jobs import SlurmJob, slurm_jobs, training_jobs
from longhaul.pipeline.runs.done import Finished, read_done
from longhaul.pipeline.terminal.table import print_table
from longhaul.pipeline.tracking.metrics_journal import parse_line

_COLUMNS = (
    "name",
    "job",
    "state",
    "step",
    "loss",
    "validation",
    "tokens/s",
    "left",
    "restarts",
    "checkpoint",
)
_SOURCE_COLUMNS = ("name", "source", "loss", "validation", "tokens", "epochs")
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RecursionError,
    yaml.YAMLError,
)
# Enough for hundreds of updates; the second size is used if much else was written after them.
_TAIL_BYTES = (256 << 10, 8 << 20)
_UPDATES = 20  # the speed is the median of this many
_CHECKPOINT = re.compile(r"step-\d{9,}")
_ENDS = {"FINISHED": "finished", "KILLED": "stopped", "FAILED": "failed"}


def print_status(roots: Sequence[str], experiment: str | None) -> None:
    """Print one row per run.

    Args:
        roots: runs, or folders of runs.
        experiment: show only runs of this MLflow experiment; None means all.

    Raises:
        ValueError: there is no such folder.
    """
    folders = {}
    for root in map(Path, roots):
        if not root.is_dir():
            raise ValueError(f"{root}: found no such folder, wanted a run, or a folder of runs")
        for folder in [root] if _is_run(root) else sorted(filter(_is_run, root.iterdir())):
            if experiment is None or _experiment(folder) == experiment:
                folders[folder.name if len(roots) == 1 else str(folder)] = folder
    if not folders:
        of_experiment = "" if experiment is None else f" of experiment {experiment}"
        print(f"no runs{of_experiment} in {', '.join(roots)}")
        return
    ids = {name: training_jobs(folder) for name, folder in folders.items()}
    all_ids = [job for some in ids.values() for job in some]
    # One question for all jobs: many jobs cost Slurm's controller as much as one.
    jobs = slurm_jobs(all_ids) if all_ids else {}
    if jobs is None:
        text = "longhaul: Slurm does not answer, so states come from the run folders alone"
        print(text, file=sys.stderr)
    rows = [_row(name, folder, ids[name], jobs or {}) for name, folder in folders.items()]
    print_table([_COLUMNS, *rows])
    sources = [row for name, folder in folders.items() for row in _source_rows(name, folder)]
    if sources:
        print()
        print_table([_SOURCE_COLUMNS, *sources])


def _is_run(folder: Path) -> bool:
    # The folder of a sweep has a job as well, but no job that trains it.
    return (folder / "config.yaml").is_file() or bool(training_jobs(folder))


def _row(
    name: str, folder: Path, ids: Sequence[str], jobs: Mapping[str, SlurmJob]
) -> Sequence[str]:
    # The training job that is running, else the first one that waits, else the last one.
    alive = [each for each in ids if each in jobs and not jobs[each].is_over]
    running = [each for each in alive if jobs[each].state != "PENDING"]
    job_id = next(iter([*running, *alive, *reversed(ids)]), "-")
    try:
        return [name, job_id, *map(one_line, _describe(folder, jobs.get(job_id)))]
    except _UNREADABLE as error:
        text = f"cannot be read: {type(error).__name__}"
        return [name, job_id, text, *["-"] * (len(_COLUMNS) - 3)]


def _source_rows(name: str, folder: Path) -> list[Sequence[str]]:
    """A row for each source of a run that has several."""
    try:
        config = _config(folder)
        sources = list(config["data"].get("sources") or ()) if config is not None else []
        # An update may have had no sample of a source: its last loss counts.
        values: dict[str, Any] = {}
        for line in _tail(folder / "logs" / "metrics.jsonl") if sources else ():
            if line["kind"] in ("train", "validation"):
                values |= line["values"]
        return [
            [
                name,
                one_line(source),
                _loss(values, f"train/loss/{source}"),
                _loss(values, f"validation/loss/{source}"),
                f"{int(values.get(f'train/tokens/{source}', 0)):,}",
                f"{float(values.get(f'train/epochs/{source}', 0)):.3g}",
            ]
            for source in sources
        ]
    except _UNREADABLE:
        return []


def _describe(folder: Path, job: SlurmJob | None) -> Sequence[str]:
    lines = _tail(folder / "logs" / "metrics.jsonl")
    finished, damage = _finished(folder)
    if job is None or job.is_over:
        if finished is not None and finished.is_imported:
            return ["imported", *["-"] * 6, _checkpoint(folder)]
        state = damage or ("finished" if finished else _folder_state(folder, lines))
        # Slurm may know more: a time limit, a node that failed. But its FAILED says less than
        # "stopped": it only means that the run stopped and was not requeued.
        says_less = state == "stopped" and job is not None and job.state == "FAILED"
        if job is not None and state in ("died", "not started", "stopped") and not says_less:
            state = job.state.lower()
    else:
        state = f"pending, {job.reason}" if job.state == "PENDING" else job.state.lower()
    updates = [line for line in lines if line["kind"] == "train"][-_UPDATES:]
    validations = [line["values"] for line in lines if line["kind"] == "validation"]
    validated = _loss(validations[-1] if validations else {}, "curves/validation_loss")
    done = 0 if finished is None else finished.step
    progress = _progress(folder, updates, done, validated, is_running=state == "running")
    return [state, *progress, "-" if job is None else job.restarts, _checkpoint(folder)]


def _experiment(folder: Path) -> str | None:
    try:
        found = _config(folder)["tracking"]["experiment"]
        return found if isinstance(found, str) else None
    except _UNREADABLE:
        return None


def _finished(folder: Path) -> tuple[Finished | None, str]:
    """How the run finished, if it has, and the state of one whose file DONE is damaged."""
    try:
        return read_done(folder / "DONE"), ""
    except (OSError, ValueError):
        return None, "DONE is damaged"


def _folder_state(folder: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    journal = folder / "logs" / "metrics.jsonl"
    if is_locked(journal.with_name(f"{journal.name}.lock")):
        return "running"
    if not journal.exists():
        return "not started"
    statuses = [line["status"] for line in lines if line["kind"] == "status"]
    # A run without a final status was killed, or its machine failed.
    return _ENDS.get(statuses[-1] if statuses else "", "died")


def _progress(
    folder: Path,
    updates: Sequence[Mapping[str, Any]],
    done: int,
    validated: str,
    *,
    is_running: bool,
) -> Sequence[str]:
    """Step out of all steps, losses, tokens/s, and the time left if the run is running.

    Without updates, as in a folder that lost its logs, the step is that of the file DONE.
    """
    tokens_per_update, total = _budget(folder)
    of_total = "" if total is None else f"/{total:,}"
    if not updates:
        return [f"{done:,}{of_total}", "-", validated, "-", "-"]
    step, values = int(updates[-1]["step"]), updates[-1]["values"]
    if total is not None and step > total:  # by the rest of a larger update
        of_total = f"/{step:,}"
    speeds = (each["values"].get("train/tokens_per_second", "NaN") for each in updates)
    known = [speed for speed in map(float, speeds) if not math.isnan(speed)]
    rate = statistics.median(known) if known else math.nan
    left = "-"
    if total is not None and is_running and known:
        seconds = (total - step) * tokens_per_update / rate
        left = str(timedelta(seconds=round(seconds)))
    loss = _loss(values, "curves/train_loss")
    return [f"{step:,}{of_total}", loss, validated, f"{rate:,.0f}" if known else "-", left]


def _loss(values: Mapping[str, Any], name: str) -> str:
    """A logged loss; runs of other versions may have logged it under another name."""
    return f"{float(values[name]):.4f}" if name in values else "-"


def _budget(folder: Path) -> tuple[int, int | None]:
    """Tokens per update, and the number of updates; 0 and None if the run has no config."""
    config = _config(folder)
    if config is None:
        return 0, None
    tokens_per_update = int(config["optim"]["tokens_per_update"])
    return tokens_per_update, -(-int(config["trainer"]["max_tokens"]) // tokens_per_update)


def _config(folder: Path) -> Any:
    """The config of the run, else the one that it was submitted with, else None."""
    # Not as a RunConfig, whose imports take seconds.
    paths = (folder / name for name in ("config.yaml", "slurm/config.yaml"))
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else parse_yaml(read_regular(path, 1 << 20))


def _checkpoint(folder: Path) -> str:
    """Step and age of the newest checkpoint."""
    paths = (folder / "checkpoints").glob("step-*")
    path = max((path for path in paths if _CHECKPOINT.fullmatch(path.name)), default=None)
    if path is None:
        return "-"
    age = timedelta(seconds=max(0, round(time.time() - path.stat().st_mtime)))
    return f"{int(path.name.removeprefix('step-')):,}, {age} ago"


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last lines of a journal, with updates and a validation if they are near its end."""
    lines: list[dict[str, Any]] = []
    for size in _TAIL_BYTES if path.is_file() else ():
        with open_regular(path) as file:
            begin = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(begin)
            content = file.read()
        # Unless the file begins here, the first line is incomplete.
        lines = _parse(content.partition(b"\n")[2] if begin else content)
        if begin == 0 or {"train", "validation"} <= {line["kind"] for line in lines}:
            break
    return lines


def _parse(content: bytes) -> list[dict[str, Any]]:
    """One object per line; lines that are damaged or incomplete are left out."""
    lines = []
    for raw in content.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(parse_line(raw))
    return lines
