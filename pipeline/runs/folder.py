"""The folder of one run, ROOT/NAME: its files, its config, and whether it is finished."""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig, load_run_config, load_stored_config, to_yaml
from longhaul.configs.loader import flatten, to_dict
from longhaul.configs.run_folders import has_run, named_run, run_folder_of
from longhaul.configs.schema import TrackingConfig
from longhaul.configs.values import typed_keys
from longhaul.datamodules.config import MANIFEST_KEYS, key_of
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import check_no_links, parse_json, read_regular, shown
from longhaul.datamodules.named import remember
from longhaul.datamodules.urls import SQLITE, is_remote, local_path
from longhaul.pipeline.checkpoints.folders import newest_step
from longhaul.pipeline.runs.done import Finished, read_done
from longhaul.pipeline.runs.named_keys import TRAINED, check_named, places_to_name
from longhaul.pipeline.system.environment import Environment, describe_environment, source_hashes
from longhaul.pipeline.tracking.mlflow_run import absolute_uri

# Keys that must not change when a run is resumed, because they determine its results. A resumed run
# may train longer, in another place, and on other devices. Shards may be moved too: that they are
# the same is checked by their hashes (data.py).
_FIXED = (
    "model.",
    "data.context",
    "data.short_first",
    "data.shuffle_shards",
    "data.validation_tokens",
    "optim.",
    "trainer.precision",
    "trainer.seed",
    "trainer.start_from",
    "trainer.branch_from",
    "trainer.train_only",
)

# Exceptions to _FIXED: these only determine how a run handles bad updates.
_FREE = ("optim.max_skipped_updates", "optim.spike_sigma", "optim.on_spike")

# Keys of a stored config whose values depend on where the run folder is.
_PLACES = (
    "root",
    "name",
    "data.manifest",
    "data.validation_manifest",
    "trainer.start_from",
    "trainer.branch_from",
    "tracking.uri",
)


class RunFolder:
    """Paths of a run's files, its config, and its DONE file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.environment_file = path / "environment.json"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.log_file = path / "logs" / "train.log"
        self.done_file = path / "DONE"

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        return cls(Path(config.root) / config.name)

    def check_same_run(self, config: RunConfig) -> None:
        """Raise ConfigError if the folder's run has another config, or has trained more tokens."""
        if not self.config_file.exists():
            return
        if difference := fixed_difference(config, stored_config(self)):
            raise ConfigError(
                f"{difference} as in {self.config_file}; give the new run another name"
            )
        # The schedule, and every number of the run, would be those of two budgets.
        trained = newest_step(self.checkpoints) * config.optim.tokens_per_update
        if (finished := self.finished()) is not None:
            trained = max(trained, finished.tokens)
        if config.num_updates * config.optim.tokens_per_update < trained:
            raise ConfigError(
                f"trainer.max_tokens: found {config.trainer.max_tokens}, wanted {trained} or more, "
                f"which {self.path} has trained; give the new run another name"
            )

    def changed_sources(self, kinds: Iterable[str]) -> list[str]:
        """A line for each kind of attention whose file is not the one the run was started with.

        A folder whose environment cannot be read, such as one of another program's, has none.
        """
        try:
            content = read_regular(self.environment_file, 1 << 20)
            before = parse_json(Environment, content, self.environment_file).attention_sha256
        except (OSError, ValueError):
            return []
        return [
            f"{self.path}: the file of kind {kind} differs from the one that trained the run: "
            f"found sha256 {now[:12]}, wanted {before[kind][:12]}"
            for kind, now in source_hashes(kinds).items()
            if before.get(kind, now) != now
        ]

    def record_start(self, config: RunConfig) -> None:
        """Write the config and the environment, and remove the marks of an earlier end.

        The environment stays the one of the first start, once a checkpoint has come of it.

        The caller must hold the lock of the metrics journal, so that only one process writes here.
        """
        # Where the folder is now is kept too, for a folder that is moved without its data.
        movable = dataclasses.replace(
            _with_relative_paths(config, self.path), root=str(self.path.parent.absolute())
        )
        if not self.environment_file.exists() or not newest_step(self.checkpoints):
            environment = json.dumps(describe_environment(config.model.kinds), indent=2)
            # Before the config, which it marks as a run's (load_run).
            write_atomically(self.environment_file, environment + "\n")
        write_atomically(self.config_file, to_yaml(movable))
        for mark in (self.done_file, self.path / "STOPPED"):
            mark.unlink(missing_ok=True)

    def check_no_links(self, *names: str) -> None:
        """Raise ValueError at a link in the files and folders of these names, before a write."""
        check_no_links(self.path, *names)

    def check_no_link_to(self, destination: str | Path) -> None:
        """Raise ValueError at a link in this folder on the way to what is to be written in it.

        Links elsewhere are the user's own, and may be followed.
        """
        path = Path(os.path.abspath(destination))
        for one, above in zip((path, *path.parents), path.parents, strict=False):
            if os.path.realpath(above) == os.path.realpath(self.path):
                self.check_no_links(one.name)

    def finished(self) -> Finished | None:
        """How the run finished, None if it has not."""
        return read_done(self.done_file)

    def mark_finished(self, finished: Finished) -> None:
        write_atomically(self.done_file, json.dumps(dataclasses.asdict(finished)) + "\n")


def fixed_difference(found: RunConfig, wanted: RunConfig, free: Collection[str] = ()) -> str:
    """The first key that differs of those that must not, what was found, and what was wanted.

    Empty without one. `free` are keys that may differ too.
    """
    now, before = (flatten(to_dict(each)) for each in (found, wanted))
    # Another kind may have other options: the kind is named, not one of them.
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key[-5:] != ".kind", key)):
        is_fixed = key.startswith(_FIXED) and key not in (*_FREE, *free)
        if is_fixed and before.get(key) != now.get(key):
            return f"{key}: found {now.get(key)!r}, wanted {before.get(key)!r}"
    orders = [", ".join(each.model.layer_attention) for each in (found, wanted)]
    if orders[0] != orders[1]:
        return f"model.layer_attention: found the order {orders[0]}, wanted {orders[1]}"
    return ""


def locate(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path | None]:
    """The run folder of a path, and the checkpoint if the path is that of a checkpoint."""
    folder, checkpoint = named_run(run_or_checkpoint)
    return RunFolder(folder), checkpoint


def stored_config(folder: RunFolder) -> RunConfig:
    """The config in a run folder, with `root` and `name` of the folder's present path.

    Its paths are absolute. A relative one begins at the run folder; if nothing is there, since the
    folder alone was moved, it begins where the folder was when the run was started.
    """
    config = load_stored_config(folder.config_file)
    places = folder.path, Path(config.root, config.name)

    def absolute(path: str) -> str:
        found = [os.path.abspath(place / path) for place in places]
        return next(filter(os.path.exists, found), found[0])

    config = _with_paths(config, absolute)
    return dataclasses.replace(config, root=str(folder.path.parent), name=folder.path.name)


def load_run(
    path: str | Path, overrides: Sequence[str] = (), sections: Sequence[str] = TRAINED
) -> RunConfig:
    """The run that a config describes, with absolute paths, so that any working folder will do.

    Paths begin at the working folder. If the file is a run's, those in it begin at the run folder,
    and `root` and `name` are those of its present path, as in `stored_config`.

    Args:
        path, overrides: as in `load_run_config`.
        sections: of a run's config, which may say only what the user has named (named_keys.py).

    Raises:
        ConfigError: one line with the key, the value found and the value wanted.
    """
    folder, places = _run_of(path)
    config = _with_paths(load_run_config(path, [*places, *overrides]), os.path.abspath)
    if folder is not None:
        typed = typed_keys(overrides)
        # The default is a database of the working folder, which no file has chosen.
        if config.tracking.uri == absolute_uri(TrackingConfig.uri):
            typed.add("tracking.uri")
        help_ = "KEY=... on the command line allows it"
        check_named(config, folder.path, sections, help_, typed)
    return config


def remember_named(
    config: RunConfig, path: str | Path, overrides: Sequence[str], sections: Sequence[str]
) -> None:
    """Remember what the user has named for a run that is to be started or queued.

    Args:
        config, path, overrides, sections: what `load_run` gave, and what it was given.
    """
    folder, _ = _run_of(path)
    typed = None if folder is None else typed_keys(overrides)
    places = places_to_name(config, sections).items()
    remember(one for key, some in places if typed is None or key in typed for one in some)


def _run_of(path: str | Path) -> tuple[RunFolder | None, list[str]]:
    """The run folder to which a config belongs, and overrides with the places in it.

    None means that the config is the user's own words.
    """
    found = run_folder_of(path)
    if found is None:
        return None, []
    file, folder = Path(os.path.abspath(os.path.expanduser(path))), RunFolder(found)
    if file.parent != folder.path and file.with_name("train.sbatch").exists():
        # `submit` has written it with absolute paths.
        stored = load_stored_config(file)
        if os.path.realpath(RunFolder.of(stored).path) != os.path.realpath(folder.path):
            raise ConfigError(
                f"root: found {shown(stored.root)} with the name {shown(stored.name)} in {file}, "
                f"wanted those of {folder.path}"
            )
    elif file == folder.config_file and has_run(folder.path):
        if "${" in str(file):  # which a value of a config would have replaced
            raise ConfigError(f"{file}: found '${{' in the path of a run, wanted a path without it")
        stored = stored_config(folder)
        values, data = flatten(to_dict(stored)), stored.data
        of_sources = [
            key_of(name, key) for key in MANIFEST_KEYS for name in data.manifests(key) if name
        ]
        return folder, [
            f"{key}={json.dumps(values[key], ensure_ascii=False)}"
            for key in (*_PLACES, *of_sources)
        ]
    return folder, []


def _with_relative_paths(config: RunConfig, folder: Path) -> RunConfig:
    """The config with paths made relative to the run folder, where it can move with them.

    With a path that has nothing but the root of the file system in common with it, it cannot.
    """

    def relative(path: str) -> str:
        path = os.path.abspath(path)
        is_far = os.path.commonpath([path, os.path.abspath(folder)]) == os.sep
        return path if is_far else os.path.relpath(path, folder)

    return _with_paths(config, relative)


def _with_paths(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """The config with its local paths changed; `root` stays."""
    data, tracking = config.data, config.tracking

    def changed(location: str) -> str:
        return location if is_remote(location) else change(str(local_path(location)))

    for key in MANIFEST_KEYS:
        places = {name: changed(place) for name, place in data.manifests(key).items()}
        data = data.with_manifests(key, places)
    trainer = config.trainer
    start_from, branch_from = (
        one and changed(one) for one in (trainer.start_from, trainer.branch_from)
    )
    uri = tracking.uri
    if uri.startswith(SQLITE):
        uri = SQLITE + change(uri.removeprefix(SQLITE))
    return dataclasses.replace(
        config,
        data=data,
        trainer=dataclasses.replace(trainer, start_from=start_from, branch_from=branch_from),
        tracking=dataclasses.replace(tracking, uri=uri),
    )
