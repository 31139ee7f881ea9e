"""A training into whose run folder a user drops things of every form, in places that it uses.

Not a test; a test starts it as a process. At every fourth update, right before a checkpoint is
saved, all NAMES take one of the FORMS; two updates later they are as they were. It prints what was
dropped. The first argument is a config, the second a file outside of the run folder.
"""

import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

STEPS_BETWEEN = 4

# Of a checkpoint {step} is the step that is about to be saved.
NAMES = (
    *("STOP", "SAVE", "PROFILE", "DONE", "STOPPED", "mlflow_run_id"),
    *("config.yaml", "environment.json", "data/train/manifest.json", "profile", "evaluation"),
    *("logs/metrics.jsonl", "logs/metrics.jsonl.lock", "logs/train.log", "logs/ranks.jsonl"),
    *("logs/run_key", "logs/run_key.lock", "logs/stacks-rank-0.txt"),
    *("checkpoints/step-{step:09d}", "checkpoints/.saving-step-{step:09d}"),
    *("checkpoints/step-999999999", "checkpoints/.removing-step-000000004"),
    *("checkpoints/step-000000001.damaged", "checkpoints/notes"),
)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("of a user")


FORMS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": _folder,
    "link": lambda path: path.symlink_to(sys.argv[2]),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o666),
    "5,000 digits": lambda path: path.write_text("9" * 5000),
    "control characters": lambda path: path.write_bytes(b"\xff\x1b[2J\0\n" * 100),
    "1 TB": _sparse,
}
# A regular file STOP is a request, which is met.
REQUESTS = ("5,000 digits", "control characters", "1 TB")


class Dropping(Callback):
    """Drops things after an update, before the training looks for requests and saves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forms = list(FORMS.items())
        self._dropped: list[tuple[Path, Path, os.stat_result]] = []
        self._step = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        step = pl_module.progress.step
        if step == self._step:
            return
        self._step = step
        if step % STEPS_BETWEEN == 0 and self._forms:
            self._drop(*self._forms.pop(0), step)
        if step % STEPS_BETWEEN == 2:
            self._tidy()

    def _drop(self, form: str, make: Callable[[Path], object], step: int) -> None:
        for name in NAMES:
            if name == "STOP" and form in REQUESTS:
                continue
            path = self._folder / name.format(step=step)
            path.parent.mkdir(exist_ok=True)
            before = path.with_name(f"{path.name}.before")
            if os.path.lexists(path):
                path.rename(before)
            make(path)
            self._dropped.append((path, before, path.lstat()))
            print(f"dropped: {form} as {name}", flush=True)

    def _tidy(self) -> None:
        """Take away what is still there, and put back what was."""
        for path, before, status in self._dropped:
            if os.path.lexists(path) and os.path.samestat(path.lstat(), status):
                if path.is_dir() and not path.is_symlink():
                    (path / "file").unlink()
                    path.rmdir()
                else:
                    path.unlink()
            if os.path.lexists(before) and not os.path.lexists(path):
                before.rename(path)
        self._dropped = []


def main() -> int:
    from longhaul.pipeline.runs.folder import RunFolder, load_run
    from longhaul.pipeline.tracking import tracker
    from longhaul.pipeline.training.run import train

    tracker.UPLOAD_EVERY_S = 0.05
    tracker.MAX_BACKOFF_S = 0.1
    logging.basicConfig(format="longhaul: %(message)s", level=logging.INFO)
    config = load_run(sys.argv[1], sys.argv[3:])
    return train(config, Dropping(RunFolder.of(config).path))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
