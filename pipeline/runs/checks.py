"""Checks of a run before a process of its own begins it."""

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.corpus import corpus_of
from longhaul.datamodules.urls import is_remote
from longhaul.pipeline.runs.folder import RunFolder


def check_run(config: RunConfig) -> None:
    """Raise ConfigError if a run of that name is another one, or if there are no such data.

    Remote data are left to the process that trains the run.
    """
    RunFolder.of(config).check_same_run(config)
    for key in ("manifest", "validation_manifest"):
        location = getattr(config.data, key)
        if location is None or is_remote(location):
            continue
        try:
            corpus_of(config.data, key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.{key}: {error}") from error
