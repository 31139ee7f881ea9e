"""The folder of one run, ROOT/NAME, and who may write to it."""

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from longhaul.configs import ConfigError, RunConfig, load_run_config, to_yaml
from longhaul.configs.loader import flatten, to_dict
from longhaul.pipeline.environment import describe_environment

# A resumed run may go on longer, elsewhere, and on other devices; what decides its numbers stays.
_FIXED = (
    "model.",
    "data.manifest",
    "data.context",
    "data.shuffle_shards",
    "optim.",
    "trainer.seed",
)


class RunFolder:
    """Paths of a run, its lock, and its finished mark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.done_file = path / "DONE"
        self._lock: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        return cls(Path(config.root) / config.name)

    def open(self, config: RunConfig) -> None:
        """Create or adopt the folder for this config, alone.

        Raises:
            ConfigError: the folder belongs to a run that differs in what decides its numbers.
            OSError: the folder cannot be written, or another process trains in it.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if self.config_file.exists():
                self._check_same_run(config)
            write_atomically(self.config_file, to_yaml(config))
            write_atomically(
                self.path / "environment.json", json.dumps(describe_environment(), indent=2) + "\n"
            )
        except PermissionError as error:
            raise OSError(f"run folder {self.path}: cannot be written: {error.strerror}") from error
        except (FileExistsError, NotADirectoryError) as error:
            raise OSError(f"run folder {self.path}: found a file in its place") from error
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(f"run folder {self.path}: cannot be written: {error.strerror}") from error

    def finished_tokens(self) -> int | None:
        """Tokens of a finished run, None while it is not finished."""
        if not self.done_file.exists():
            return None
        return int(json.loads(self.done_file.read_text())["tokens"])

    def mark_finished(self, step: int, tokens: int) -> None:
        write_atomically(self.done_file, json.dumps({"step": step, "tokens": tokens}) + "\n")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        # The kernel drops the lock with the process, so kill -9 leaves nothing to clean up.
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 32).decode() or "unknown"
            os.close(lock)
            raise OSError(
                f"run folder {self.path}: process {owner} is training in it, wanted it free"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock

    def _check_same_run(self, config: RunConfig) -> None:
        before = flatten(to_dict(load_run_config(self.config_file)))
        now = flatten(to_dict(config))
        for key in sorted(before.keys() | now.keys()):
            if key.startswith(_FIXED) and before.get(key) != now.get(key):
                raise ConfigError(
                    f"{key}: found {now.get(key)!r}, wanted {before.get(key)!r} as in "
                    f"{self.config_file}; give the new run another name"
                )


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or none of it, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def locate(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path | None]:
    """The run folder that a path names, and the checkpoint if the path names one."""
    path = Path(run_or_checkpoint)
    if path.parent.name == "checkpoints" and path.is_dir():
        folder, checkpoint = RunFolder(path.parent.parent), path
    else:
        folder, checkpoint = RunFolder(path), None
    if not folder.config_file.is_file():
        raise ValueError(
            f"{path}: found no config.yaml, wanted a run folder or one of its checkpoints"
        )
    return folder, checkpoint


def stored_config(folder: RunFolder) -> RunConfig:
    """The config of a run, as if it had been started where it lies now."""
    config = load_run_config(folder.config_file)
    return dataclasses.replace(config, root=str(folder.path.parent), name=folder.path.name)
