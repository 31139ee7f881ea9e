"""Queues a run, or a sweep of runs, with Slurm."""

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig, to_yaml
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import check_regular, open_to_write
from longhaul.pipeline.cluster.jobs import JOBS_FILE, slurm_jobs, training_jobs
from longhaul.pipeline.cluster.scripts import (
    evaluate_script,
    prepare_script,
    sweep_script,
    train_script,
)
from longhaul.pipeline.runs.data import check_run
from longhaul.pipeline.runs.folder import RunFolder, load_run, remember_named
from longhaul.pipeline.runs.named_keys import SUBMITTED
from longhaul.pipeline.runs.sweep import read_sweep, remember_sweep, with_absolute_root
from longhaul.pipeline.system.devices import find_device
from longhaul.pipeline.system.waiting import QUEUE_S

logger = logging.getLogger(__name__)

# What a submission and the jobs of slurm.then write into a run folder.
_WRITTEN = ("slurm", "logs", "STOPPED", "export", "evaluation", "mlflow_run_id")


class _NoAnswerError(RuntimeError):
    """sbatch has not said whether it has queued a job."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """A job's script in the folder of a run or a sweep.

    `kind` is train, sweep, evaluate, prepare or pack.
    """

    kind: str
    script: Path
    text: str


def submit(
    path: str, overrides: Sequence[str], *, chain: int, after: str | None, dry_run: bool
) -> None:
    """Queue a job that trains a run, or print its script.

    Args:
        path, overrides: the config, as in `load_run`.
        chain: number of further jobs; each continues the run if the jobs before did not finish it.
        after: id of a job that must end first; None means none.
        dry_run: print the script, queue nothing.

    Raises:
        ConfigError: the run could not work on the cluster.
        RuntimeError: there is no Slurm, or the run is queued already.
    """
    config = with_absolute_root(load_run(path, overrides, SUBMITTED))
    _check([config], after, dry_run)
    job = _training_job(config)
    if dry_run:
        print(job.text, end="")
        return
    if _is_finished(config):
        return
    remember_named(config, path, overrides, SUBMITTED)
    folder = RunFolder.of(config)
    options = _dependency_on(after)
    with _removed_if_refused([job]):
        _write_job_files(config, job)
        answer = _sbatch(folder.path, job, options)
    ids = [_record_answer(folder.path, job, options, answer)]
    for _ in range(chain):
        # After all earlier jobs, since afternotok is also met by a cancelled job. If one of them
        # finishes the run, this job is cancelled.
        before = ",".join(f"afternotok:{one}" for one in ids)
        ids.append(_queue(folder.path, job, ["--dependency", before]))
    _queue_evaluation(config, "?".join(f"afterok:{one}" for one in ids))
    print(f"log: {folder.path}/logs/job-{ids[0]}.log")
    print(f"MLflow: {_mlflow_location(config)}")


def submit_sweep(
    path: str,
    overrides: Sequence[str],
    sweep: Sequence[str],
    *,
    throttle: int,
    after: str | None,
    dry_run: bool,
) -> None:
    """Queue a job array with one run for each combination of the sweep's values; see `submit`.

    Args:
        sweep: items such as `key.sub=A,B`.
        throttle: most runs at the same time.
    """
    runs = read_sweep(path, overrides, sweep, SUBMITTED)
    folder, configs = runs.folder, runs.configs
    _check(configs, after, dry_run)
    if not dry_run:
        configs = tuple(config for config in configs if not _is_finished(config))
        if not configs:
            return
    jobs = [_training_job(config) for config in configs]
    text = sweep_script(configs, folder, [job.script for job in jobs], throttle)
    if dry_run:
        print(text, end="")
        return
    _check_journal(folder)
    configs = dataclasses.replace(runs, configs=configs).below_parent().configs
    remember_sweep(runs, path, overrides, sweep, SUBMITTED)
    array, options = _Job("sweep", folder / "slurm" / "sweep.sbatch", text), _dependency_on(after)
    # Not the sweep's own folder, which names its parent run in MLflow.
    with _removed_if_refused(jobs):
        for config, job in zip(configs, jobs, strict=True):
            _write_job_files(config, job)
        array.script.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(array.script, array.text)
        answer = _sbatch(folder, array, options)
    job_id = _record_answer(folder, array, options, answer)
    for index, config in enumerate(configs):
        run = RunFolder.of(config).path
        _record_job(run, "train", f"{job_id}_{index}")
        _queue_evaluation(config, f"afterok:{job_id}_{index}")
    print(f"logs: {folder}/logs/job-{job_id}_*.log")
    print(f"MLflow: {_mlflow_location(configs[0])}, below {folder.name}")


def submit_prepare(
    path: str,
    overrides: Sequence[str],
    arguments: Sequence[str],
    *,
    tasks: int,
    throttle: int,
    after: str | None,
    dry_run: bool,
) -> None:
    """Queue an array whose tasks tokenize a part of the data each, and a job that packs them.

    Args:
        path, overrides: the config of a run, whose section `slurm` and whose folder are used.
        arguments: of `longhaul prepare`.
        tasks: number of parts.
        throttle: most tasks at the same time.
        after, dry_run: as of `submit`.
    """
    config = with_absolute_root(load_run(path, overrides, SUBMITTED))
    _check_sbatch(dry_run)
    run = RunFolder.of(config)
    _check_folder(run.path)
    folder = run.path / "slurm"
    text = prepare_script(config, run.path, arguments, tasks, throttle)
    array = _Job("prepare", folder / "prepare.sbatch", text)
    text = prepare_script(config, run.path, arguments, None, throttle)
    pack = _Job("pack", folder / "pack.sbatch", text)
    if dry_run:
        print(f"{array.text}\n{pack.text}", end="")
        return
    run.check_no_links(*_WRITTEN)
    _check_journal(run.path)
    folder.mkdir(parents=True, exist_ok=True)
    for job in (array, pack):
        write_atomically(job.script, job.text)
    array_id = _queue(run.path, array, _dependency_on(after))
    pack_id = _queue(run.path, pack, ["--dependency", f"afterok:{array_id}"])
    print(f"logs: {run.path}/logs/job-{array_id}_*.log, job-{pack_id}.log")


def _is_finished(config: RunConfig) -> bool:
    """Whether a run has trained all its tokens, which is then said."""
    folder = RunFolder.of(config)
    finished = folder.finished()
    if finished is None or finished.tokens < config.trainer.max_tokens:
        return False
    print(f"run {folder.path} is finished: {finished.tokens:,} tokens")
    return True


def _check(configs: Sequence[RunConfig], after: str | None, dry_run: bool) -> None:
    """Raise where the configs could not be queued, or their runs would fail."""
    _check_sbatch(dry_run)
    for config in configs:
        _check_can_run(config, dry_run)
    if not dry_run:
        _check_not_queued(configs, after)


def _check_sbatch(dry_run: bool) -> None:
    if not dry_run and shutil.which("sbatch") is None:
        raise RuntimeError("sbatch: not found on this machine, wanted a login node of the cluster")


def _check_folder(folder: Path) -> None:
    if {"%", "\\"} & set(str(folder)):
        raise ConfigError(
            f"name: found {str(folder)!r}, wanted a folder without % and \\, which Slurm "
            "replaces in names of logs"
        )


def _check_journal(folder: Path) -> None:
    """Raise ValueError if the jobs of a run or a sweep could not be recorded once they are queued.

    What someone else has made may hold a FIFO or a folder of that name.
    """
    with suppress(FileNotFoundError):
        check_regular(folder / JOBS_FILE)


@contextmanager
def _removed_if_refused(jobs: Sequence[_Job]) -> Iterator[None]:
    """Context of writing the files of training jobs and asking sbatch.

    If nothing was queued, it removes the files that were not there before, and empty folders. After
    Ctrl-C, or without an answer, nothing is removed: sbatch may have queued the job, which then
    reads these files.
    """
    files = [file for job in jobs for file in (job.script, _config_file(job))]
    new = [file for file in files if not file.exists()]
    try:
        yield
    except _NoAnswerError:
        raise
    except (OSError, RuntimeError):
        with suppress(OSError):
            for file in new:
                file.unlink(missing_ok=True)
        for run in (job.script.parent.parent for job in jobs):
            for folder in (run / "slurm", run / "logs", run):
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
        raise


def _check_can_run(config: RunConfig, dry_run: bool) -> None:
    folder = RunFolder.of(config)
    _check_folder(folder.path)
    if dry_run:  # It prints the script anywhere, where the data are not too.
        folder.check_same_run(config)
    else:
        check_run(config)
        folder.check_no_links(*_WRITTEN)
        _check_journal(folder.path)
    # Some clusters know GPUs by an option of their own, such as --gres=gpu:8.
    asks_for_gpus = any(
        re.match(r"--gpus|--gres=.*gpu|-G", option) for option in config.slurm.extra
    )
    if config.trainer.accelerator == "gpu" and config.slurm.gpu is None and not asks_for_gpus:
        raise ConfigError(
            "slurm.gpu: found null with trainer.accelerator gpu, wanted the type of the GPUs, or "
            "any"
        )
    if config.slurm.gpu is None:
        return
    device = find_device(config.slurm.gpu)
    if device is None:
        logger.info("memory was not checked: slurm.gpu %s is unknown", config.slurm.gpu)
        return
    # Imported here: they load torch's sharding, which takes seconds.
    from longhaul.pipeline.planning import fit
    from longhaul.pipeline.planning.memory import Planner

    planner = Planner(config)
    if not fit.fits(planner.plan(fit.configured_settings(config)), device.memory_bytes):
        raise ConfigError(fit.verdict(config, device, planner))


def _check_not_queued(configs: Sequence[RunConfig], after: str | None) -> None:
    """Refuse a second job of a run, unless it waits for the run's last job: two cannot train it."""
    known = None if after is None else slurm_jobs([after])
    # squeue lists an array as its tasks.
    if known is not None and after not in {*known, *(one.partition("_")[0] for one in known)}:
        raise ConfigError(f"--after: found {after}, wanted a job that Slurm knows")
    for config in configs:
        run = RunFolder.of(config).path
        ids = training_jobs(run)
        jobs = slurm_jobs(ids) if ids else None
        alive = [one for one in ids if jobs and one in jobs and not jobs[one].is_over]
        if alive and after != alive[-1]:
            raise RuntimeError(
                f"{run}: found job {alive[0]} in the queue, wanted none; scancel it first, or "
                f"--after {alive[-1]}"
            )


def _training_job(config: RunConfig) -> _Job:
    folder = RunFolder.of(config).path
    job = _Job("train", folder / "slurm" / "train.sbatch", "")
    return dataclasses.replace(job, text=train_script(config, folder, _config_file(job)))


def _config_file(job: _Job) -> Path:
    """The config that a training job reads."""
    return job.script.with_name("config.yaml")


def _write_job_files(config: RunConfig, job: _Job) -> None:
    """Write the files that a job reads, and delete the marks with which an earlier job stopped."""
    folder = job.script.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "logs").mkdir(exist_ok=True)
    for note in (folder / "BAD", folder.parent / "STOPPED"):
        note.unlink(missing_ok=True)
    write_atomically(_config_file(job), to_yaml(config))
    write_atomically(job.script, job.text)


def _queue_evaluation(config: RunConfig, dependency: str) -> None:
    """Queue the commands of slurm.then, to start after the training has succeeded."""
    if not config.slurm.then:
        return
    run = RunFolder.of(config).path
    job = _Job("evaluate", run / "slurm" / "evaluate.sbatch", evaluate_script(config, run))
    write_atomically(job.script, job.text)
    _queue(run, job, ["--dependency", dependency])


def _queue(folder: Path, job: _Job, options: Sequence[str]) -> str:
    """Give a script to sbatch; return the job's id."""
    return _record_answer(folder, job, options, _sbatch(folder, job, options))


def _sbatch(folder: Path, job: _Job, options: Sequence[str]) -> str:
    """What sbatch prints about a script that it has queued.

    Raises:
        OSError, RuntimeError: nothing was queued.
        _NoAnswerError: the job may be queued.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    command = ["sbatch", "--parsable", "--kill-on-invalid-dep=yes", *options, str(job.script)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=QUEUE_S)
    except subprocess.TimeoutExpired:
        raise _NoAnswerError(
            f"sbatch: found no answer in {QUEUE_S:g} s, wanted a job id; the job may be "
            "queued, as squeue --me tells"
        ) from None
    if result.returncode:
        raise RuntimeError(f"sbatch refused {job.script}: {result.stderr.strip()}")
    return result.stdout


def _record_answer(folder: Path, job: _Job, options: Sequence[str], answer: str) -> str:
    """Record the queued job that sbatch's answer names; return its id."""
    # A site's own sbatch may print more; with several clusters it prints ID;CLUSTER.
    ids = re.findall(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE)
    if not ids:
        raise RuntimeError(f"sbatch: found {answer!r}, wanted a job id; the job may be queued")
    job_id: str = ids[-1]
    _record_job(folder, job.kind, job_id)
    after = f", {' '.join(options)}" if options else ""
    print(f"job {job_id}: {job.kind} {folder}{after}", flush=True)
    return job_id


def _record_job(folder: Path, kind: str, job_id: str) -> None:
    entry = {"job_id": job_id, "time_ms": time.time_ns() // 1_000_000, "kind": kind}
    with open(open_to_write(folder / JOBS_FILE, os.O_WRONLY | os.O_APPEND), "a") as file:
        file.write(json.dumps(entry) + "\n")


def _dependency_on(job: str | None) -> list[str]:
    return [] if job is None else ["--dependency", f"afterany:{job}"]


def _mlflow_location(config: RunConfig) -> str:
    return f"{config.tracking.uri}, experiment {config.tracking.experiment}, run {config.name}"
