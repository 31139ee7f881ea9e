"""What a run folder keeps of its data, so that they are known again wherever they are.

`RUN/data/train` and `RUN/data/validation` hold copies of the manifests, without shards; the first
one holds the tokenizer too, if that is a file.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest, load_manifest
from longhaul.datamodules.tokenizer import FileTokenizer, tokenizer_of
from longhaul.datamodules.urls import at_home, is_remote, local_path
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.named_keys import check_named

# The folder in RUN/data of each key of the config that names a manifest.
_COPIES = {"manifest": "train", "validation_manifest": "validation"}
# What two manifests of the same data have in common, beside the shards.
_SAME = ("tokenizer_sha256", "vocab_size", "bos_id", "eot_id", "document_tokens", "dtype")


def record_data(folder: RunFolder, data: DataConfig) -> None:
    """Copy the manifests, and the tokenizer, into the folder of a run that begins.

    Raises OSError if a file cannot be written.
    """
    for key, name in _COPIES.items():
        location = getattr(data, key)
        if location is None:
            continue
        manifest = load_manifest(location)
        copy = folder.data / name
        copy.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_of(manifest)
        if key == "manifest" and isinstance(tokenizer, FileTokenizer):
            write_atomically(copy / manifest.tokenizer, tokenizer.content)
        manifest.save(copy)


def training_manifest(folder: RunFolder, config: RunConfig) -> Manifest:
    """The manifest of the data that a run was trained on, beside which its tokenizer is."""
    recorded = recorded_manifest(folder, "manifest")
    if recorded is None:
        help_ = f"put the manifest and its tokenizer into {folder.data / 'train'}"
        check_named(config, folder.path, ["data.manifest"], help_)
        return load_manifest(config.data.manifest)
    return recorded


def check_same_data(
    folder: RunFolder, data: DataConfig, before: DataConfig, *, may_be_gone: bool
) -> None:
    """Raise ConfigError if these are not the data that a run has begun with.

    Data that were moved are the same if their hashes are.

    Args:
        folder: of the run. One that holds no copies of manifests is not checked.
        data: to be read now.
        before: as the folder's config has it.
        may_be_gone: accept that data can no longer be read where `before` says they are.
    """
    if recorded_manifest(folder, "manifest") is None:
        return
    for key in _COPIES:
        recorded, location = recorded_manifest(folder, key), getattr(data, key)
        if recorded is None or location is None:
            if (recorded is None) != (location is None):
                raise ConfigError(
                    f"data.{key}: found {location or 'null'}, wanted "
                    f"{getattr(before, key) or 'null'} as in {folder.config_file}"
                )
            continue
        try:
            found = load_manifest(location)
        except OSError as error:
            if may_be_gone and location == getattr(before, key):
                continue
            raise ConfigError(f"data.{key}: {error}") from error
        if difference := _difference(found, recorded):
            raise ConfigError(f"data.{key}: {difference}")


def with_moved_data(
    folder: RunFolder, config: RunConfig, location: str
) -> tuple[RunConfig, set[str]]:
    """The config with the places where the run's data are now, and the keys that name them.

    Args:
        folder: of the run.
        config: of the run.
        location: of a manifest or the folder of one, or a folder of such folders.

    Raises:
        ValueError: it has none of the run's data.
    """
    location = at_home(location)
    places = [location]
    if not is_remote(location):
        below = local_path(location).glob(f"*/{MANIFEST_NAME}")
        places = [str(one.absolute()) for one in (local_path(location), *sorted(below))]
    found = []
    for place in places:
        try:
            found.append(load_manifest(place))
        except FileNotFoundError:
            continue
    moved: dict[str, str] = {}
    differences = []
    for key in _COPIES:
        recorded = recorded_manifest(folder, key)
        if recorded is None:
            continue
        for manifest in found:
            if difference := _difference(manifest, recorded):
                differences.append(difference)
            else:
                moved[key] = manifest.location
                break
    if not moved:
        cause = f"found no {MANIFEST_NAME} in {location}, wanted the shards of {folder.path}"
        raise ValueError(f"--data: {differences[-1] if differences else cause}")
    data = dataclasses.replace(config.data, **moved)  # type: ignore[arg-type]
    return dataclasses.replace(config, data=data), {f"data.{key}" for key in moved}


@contextmanager
def moved_data_are_explained(key: str) -> Iterator[None]:
    """Context in which a manifest that is not there is bad input, with the option that helps."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"data.{key}: {error}; `longhaul evaluate --data FOLDER` reads moved data"
        ) from error


def recorded_manifest(folder: RunFolder, key: str) -> Manifest | None:
    """The run folder's copy of the manifest that a key of DataConfig names, None without one."""
    path = folder.data / _COPIES[key] / MANIFEST_NAME
    return load_manifest(path) if path.is_file() else None


def _difference(found: Manifest, recorded: Manifest) -> str:
    """What was found and what was wanted; empty if both describe the same data."""
    as_before = f"as in {recorded.location}"
    for key in _SAME:
        if getattr(found, key) != getattr(recorded, key):
            (name, now), (_, before) = found.shown(key), recorded.shown(key)
            return f"found {name} {now} in {found.location}, wanted {before} {as_before}"
    if found.shards_sha256 != recorded.shards_sha256:
        return f"found other shards in {found.location}, wanted the same ones {as_before}"
    return ""
