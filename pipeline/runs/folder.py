"""The folder of one run, ROOT/NAME: its files, its config, and whether it is finished."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig, load_stored_config, to_yaml
from longhaul.configs.loader import flatten, to_dict
from longhaul.datamodules.untrusted import Count, parse_json, read_regular
from longhaul.datamodules.urls import is_remote, local_path
from longhaul.pipeline.system.environment import describe_environment
from longhaul.pipeline.system.files import write_atomically
from longhaul.pipeline.tracking.mlflow_run import absolute_uri

# Keys that must not change when a run is resumed, because they determine its results. A resumed run
# may train longer, in another place, and on other devices. Shards may be moved too: that they are
# the same is checked by their hashes.
_FIXED = (
    "model.",
    "data.context",
    "data.shuffle_shards",
    "optim.",
    "trainer.precision",
    "trainer.seed",
    "trainer.start_from",
    "trainer.train_only",
)

# Exceptions to _FIXED: these only determine how a run handles bad updates.
_FREE = ("optim.max_skipped_updates", "optim.spike_sigma", "optim.on_spike")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """The contents of the file DONE."""

    step: Count
    tokens: Count
    is_tracked: bool  # whether everything has been uploaded to MLflow


class RunFolder:
    """Paths of a run's files, its config, and its DONE file."""

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

    def check_same_run(self, config: RunConfig) -> None:
        """Raise ConfigError if a key that must not change differs from the folder's config."""
        if not self.config_file.exists():
            return
        stored = load_stored_config(self.config_file)
        before, now = flatten(to_dict(stored)), flatten(to_dict(config))
        for key in sorted(before.keys() | now.keys()):
            is_fixed = key.startswith(_FIXED) and key not in _FREE
            if is_fixed and before.get(key) != now.get(key):
                raise ConfigError(
                    f"{key}: found {now.get(key)!r}, wanted {before.get(key)!r} as in "
                    f"{self.config_file}; give the new run another name"
                )
        orders = [list(each.model.layer_attention) for each in (config, stored)]
        if orders[0] != orders[1]:
            raise ConfigError(
                f"model.layer_attention: found the order {', '.join(orders[0])}, wanted "
                f"{', '.join(orders[1])} as in {self.config_file}; give the new run another name"
            )
        if before["trainer.max_tokens"] != now["trainer.max_tokens"]:
            logger.warning(
                "trainer.max_tokens: found %d, %d before; the learning rate schedule ends there",
                now["trainer.max_tokens"],
                before["trainer.max_tokens"],
            )

    def record_start(self, config: RunConfig) -> None:
        """Write the config and the environment, and remove the marks of an earlier end.

        The caller must hold the lock of the metrics journal, so that only one process writes here.
        """
        for mark in (self.done_file, self.path / "STOPPED"):
            mark.unlink(missing_ok=True)
        write_atomically(self.config_file, to_yaml(config))
        environment = json.dumps(describe_environment(), indent=2)
        write_atomically(self.environment_file, environment + "\n")

    def finished(self) -> Finished | None:
        """How the run finished, None if it has not."""
        if not self.done_file.exists():
            return None
        return parse_json(Finished, read_regular(self.done_file, 1 << 16), self.done_file)

    def mark_finished(self, finished: Finished) -> None:
        write_atomically(self.done_file, json.dumps(dataclasses.asdict(finished)) + "\n")


def locate(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path | None]:
    """The run folder of a path, and the checkpoint if the path is that of a checkpoint."""
    path = Path(run_or_checkpoint).absolute()
    if path.parent.name == "checkpoints" and path.is_dir():
        folder, checkpoint = RunFolder(path.parent.parent), path
    else:
        folder, checkpoint = RunFolder(path), None
    if not folder.config_file.is_file():
        raise ValueError(
            f"{run_or_checkpoint}: found no config.yaml, wanted a run folder or one of its "
            "checkpoints"
        )
    return folder, checkpoint


def stored_config(folder: RunFolder) -> RunConfig:
    """The config in a run folder, with `root` and `name` of the folder's present path."""
    config = load_stored_config(folder.config_file)
    return dataclasses.replace(config, root=str(folder.path.parent), name=folder.path.name)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with local paths made absolute, so that it is valid in any working folder."""
    data, tracking, start_from = config.data, config.tracking, config.trainer.start_from
    validation = data.validation_manifest
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            manifest=_absolute(data.manifest),
            validation_manifest=None if validation is None else _absolute(validation),
        ),
        trainer=dataclasses.replace(
            config.trainer, start_from=None if start_from is None else _absolute(start_from)
        ),
        tracking=dataclasses.replace(tracking, uri=absolute_uri(tracking.uri)),
    )


def _absolute(location: str) -> str:
    return location if is_remote(location) else str(local_path(location).absolute())
