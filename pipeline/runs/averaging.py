"""The mean of a run's last checkpoints, as a run folder with one checkpoint, of weights alone."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from longhaul.datamodules.files.untrusted import copy_regular
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.checkpoints.folders import checkpoint_folders, step_of
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.runs.data import copy_records
from longhaul.pipeline.runs.done import Finished
from longhaul.pipeline.runs.folder import RunFolder, locate, stored_config
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder

_MOST_ENVIRONMENT_BYTES = 1 << 20


def average(
    run_or_checkpoint: str | Path, destination: str | Path, last: int | None = None
) -> list[int]:
    """Write a run folder whose only checkpoint is the mean of a run's last ones.

    It has the config, the data and the counters of the run, and counts as finished. Evaluation,
    generation and export read it as any other run, and trainer.start_from begins with its weights.

    Args:
        run_or_checkpoint: a run folder, or the last checkpoint of it to take.
        destination: a folder that does not exist yet, or is empty; it is whole or not there.
        last: number of checkpoints, 2 or more; None: as many as `checkpoint.keep_last` keeps.

    Returns:
        The steps of the checkpoints.

    Raises:
        ValueError: there are not so many checkpoints, or the destination holds something or lies
            behind a link in the run folder.
        CheckpointError: a checkpoint is damaged, or has another model than the run.
        OSError: the folder cannot be written.
    """
    run, newest = locate(run_or_checkpoint)
    run.check_no_link_to(destination)
    target = new_or_empty_folder(destination)
    config = stored_config(run)
    last = config.checkpoint.keep_last if last is None else last
    if last < 2:
        raise ValueError(f"--last: found {last}, wanted 2 or more")
    there = [
        path
        for path in checkpoint_folders(run.checkpoints)
        if newest is None or step_of(path) <= step_of(newest)
    ]
    if len(there) < last:
        raise ValueError(
            f"--last: found {len(there)} checkpoints in {run.checkpoints}, wanted {last}; "
            "checkpoint.keep_last says how many a run keeps"
        )
    chosen = [SavedCheckpoint(path, "model") for path in there[-last:]]
    steps = [step_of(saved.path) for saved in chosen]
    state = chosen[-1].state(TrainingState)
    model = build_on_meta(config.model)
    for saved in chosen:
        saved.check_group("model", model.state_dict())
    num_bytes = sum(one.nbytes for one in model.state_dict().values())
    with atomic_folder(target) as path:
        folder = RunFolder(path)
        progress = dataclasses.asdict(state.progress)
        state_of_mean = {"progress": progress, "shards_sha256": state.shards_sha256}
        CheckpointStore(folder.checkpoints, keep_last=1).write(
            steps[-1], num_bytes, _mean(chosen, model), state_of_mean | {"averaged_steps": steps}
        )
        copy_records(run, folder)
        if run.environment_file.exists():
            # The machine and the versions stay those of the training.
            copy_regular(run.environment_file, folder.environment_file, _MOST_ENVIRONMENT_BYTES)
        folder.record_start(dataclasses.replace(config, name=target.name, root=str(target.parent)))
        done = Finished(state.progress.step, state.progress.tokens, is_tracked=True)
        folder.mark_finished(done)
    return steps


def _mean(chosen: Sequence[SavedCheckpoint], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """The mean of each weight, summed in float64, in its stored type; buffers are the newest's."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in model.state_dict():
        full = f"model/{name}"
        newest = chosen[-1].read_one(full)
        if name not in buffers:
            total = newest.double()
            for saved in chosen[:-1]:
                total += saved.read_one(full)
            newest = (total / len(chosen)).to(newest.dtype)
        yield full, newest
