"""A sweep: one run for each combination of values, all below one parent run in MLflow."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig
from longhaul.pipeline.runs.folder import RunFolder, load_run
from longhaul.pipeline.tracking.mlflow_run import create_parent

# Made from the values of the others, or shared by all runs.
_FIXED_KEYS = ("name", "root", "tracking.parent_run_id")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, and the folder of what they share."""

    folder: Path
    configs: tuple[RunConfig, ...]

    def below_parent(self) -> "Sweep":
        """The sweep with its parent run in MLflow, which is created once per folder.

        Raises:
            RuntimeError: MLflow cannot be reached.
        """
        tracking = self.configs[0].tracking
        parent = create_parent(self.folder, tracking.uri, tracking.experiment, self.folder.name)
        configs = (
            dataclasses.replace(
                config, tracking=dataclasses.replace(config.tracking, parent_run_id=parent)
            )
            for config in self.configs
        )
        return Sweep(self.folder, tuple(configs))


def read_sweep(path: str, overrides: Sequence[str], axes: Sequence[str]) -> Sweep:
    """The sweep of a config over axes such as `key.sub=A,B`; nothing is written.

    The values of a run become part of its name, so that the same axes give the same runs.

    Raises:
        ConfigError: an axis or a config is wrong, or two runs would be equal or have the same name.
    """
    values: list[list[str]] = []
    for axis in axes:
        key, equals, listed = axis.partition("=")
        if not (key and equals and listed):
            raise ConfigError(f"--sweep: found {axis!r}, wanted key.sub=A,B")
        if key in _FIXED_KEYS:
            raise ConfigError(
                f"--sweep: found {axis!r}, wanted another key: all runs of a sweep are in one root "
                "below one parent, and named after their values"
            )
        values.append([f"{key}={value}" for value in listed.split(",")])
    base = load_run(path, overrides)
    configs: dict[str, RunConfig] = {}
    for combination in itertools.product(*values):
        pairs = [one.split("=", 1) for one in combination]
        parts = [f"{key.rpartition('.')[2]}={value}".replace("/", "_") for key, value in pairs]
        name = "-".join([base.name, *parts])
        if name in configs:
            raise ConfigError(f"--sweep: found two runs {name!r}, wanted names that differ")
        # Not as an override: YAML would read more into a name than text.
        config = dataclasses.replace(load_run(path, [*overrides, *combination]), name=name)
        config = with_absolute_root(config)
        for other in configs.values():
            if dataclasses.replace(config, name=other.name) == other:
                raise ConfigError(
                    f"--sweep: found {other.name!r} and {name!r}, which are the same run, wanted "
                    "values that differ"
                )
        configs[name] = config
    # Not the base run's own folder: a run of that name may exist.
    folder = RunFolder.of(with_absolute_root(base)).path.with_name(f"{base.name}-sweep")
    return Sweep(folder, tuple(configs.values()))


def with_absolute_root(config: RunConfig) -> RunConfig:
    """The config with `root` absolute as its other paths, for a process in another folder."""
    return dataclasses.replace(config, root=str(Path(config.root).absolute()))
