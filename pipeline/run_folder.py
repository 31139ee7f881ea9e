"""The folder of one run, ROOT/NAME."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Finished:
    """What DONE says."""

    step: int
    tokens: int
    is_tracked: bool  # everything is in MLflow


class RunFolder:
    """Paths of a run, its config, and its finished mark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.environment_file = path / "environment.json"
        self.checkpoints = path / "checkpoints"
        self.log_file = path / "logs" / "train.log"
        self.done_file = path / "DONE"

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        return cls(Path(config.root) / config.name)

    def adopt(self, config: RunConfig) -> None:
        """Write what the run is and runs on; the caller holds the journal, and so the folder.

        Raises:
            ConfigError: the folder belongs to a run that differs in what decides its numbers.
            OSError: the folder cannot be written.
        """
        if self.config_file.exists():
            self._check_same_run(config)
        write_atomically(self.config_file, to_yaml(config))
        environment = json.dumps(describe_environment(), indent=2)
        write_atomically(self.environment_file, environment + "\n")

    def finished(self) -> Finished | None:
        """How the run ended, None while it has not."""
        if not self.done_file.exists():
            return None
        return Finished(**json.loads(self.done_file.read_text()))

    def mark_finished(self, finished: Finished) -> None:
        write_atomically(self.done_file, json.dumps(dataclasses.asdict(finished)) + "\n")

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
