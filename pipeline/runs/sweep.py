"""A sweep: one run for each combination of values, all below one parent run in MLflow."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.files.untrusted import check_no_links
from longhaul.pipeline.runs.axes import combinations
from longhaul.pipeline.runs.folder import RunFolder, load_run, remember_named
from longhaul.pipeline.runs.named_keys import TRAINED
from longhaul.pipeline.tracking.mlflow_run import create_parent


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, and the folder of what they share."""

    folder: Path
    configs: tuple[RunConfig, ...]

    def below_parent(self) -> "Sweep":
        """The sweep with its parent run in MLflow, which is created once per folder.

        Raises:
            ValueError: the folder is a link, or holds one, which may be that of someone else.
            RuntimeError: MLflow cannot be reached.
        """
        check_no_links(self.folder.parent, self.folder.name)
        tracking = self.configs[0].tracking
        parent = create_parent(self.folder, tracking.uri, tracking.experiment, self.folder.name)
        configs = (
            dataclasses.replace(
                config, tracking=dataclasses.replace(config.tracking, parent_run_id=parent)
            )
            for config in self.configs
        )
        return Sweep(self.folder, tuple(configs))


def read_sweep(
    path: str, overrides: Sequence[str], axes: Sequence[str], sections: Sequence[str] = TRAINED
) -> Sweep:
    """The sweep of a config over axes, which `combinations` describes; nothing is written.

    The values of a run become part of its name, in the order of a config's keys, so that the
    same axes give the same runs in whatever order they are named.

    Args:
        path, overrides, sections: as in `load_run`.

    Raises:
        ConfigError: an axis or a config is wrong, or two runs would be equal or have the same name.
    """
    base = load_run(path, overrides, sections)
    configs: dict[str, RunConfig] = {}
    for combination in combinations(axes):
        pairs = [one.split("=", 1) for one in combination]
        parts = [f"{key.rpartition('.')[2]}={value}".replace("/", "_") for key, value in pairs]
        name = "-".join([base.name, *parts])
        if name in configs:
            raise ConfigError(f"--sweep: found two runs {name!r}, wanted names that differ")
        # Not as an override: YAML would read more into a name than text.
        config = load_run(path, [*overrides, *combination], sections)
        config = dataclasses.replace(config, name=name)
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


def remember_sweep(
    sweep: Sweep, path: str, overrides: Sequence[str], axes: Sequence[str], sections: Sequence[str]
) -> None:
    """Remember what the user has named for the runs of a sweep; arguments as of `read_sweep`."""
    typed = [*overrides, *itertools.chain(*combinations(axes))]
    for config in sweep.configs:
        remember_named(config, path, typed, sections)


def with_absolute_root(config: RunConfig) -> RunConfig:
    """The config with `root` absolute as its other paths, for a process in another folder."""
    return dataclasses.replace(config, root=str(Path(config.root).absolute()))
