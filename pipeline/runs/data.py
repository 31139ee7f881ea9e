"""What a run folder keeps of its data, so that they are known again wherever they are.

`RUN/data/train` and `RUN/data/validation` hold records of the corpora, without tokens; the first
one holds the tokenizer too, if that is a file.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import Corpus, corpus_of, find_corpora, load_corpus
from longhaul.datamodules.urls import at_home, is_remote
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.named_keys import check_named

# The folder in RUN/data of each key of the config that names a corpus.
_RECORDS = {"manifest": "train", "validation_manifest": "validation"}


def check_run(config: RunConfig) -> None:
    """Raise ConfigError if a run of that name is another one, or if there are no such data.

    For a run that another process will begin, to which remote data are left.
    """
    RunFolder.of(config).check_same_run(config)
    for key in _RECORDS:
        location = getattr(config.data, key)
        if location is not None and not is_remote(location):
            try:
                corpus_of(config.data, key)
            except (OSError, ValueError) as error:
                raise ConfigError(f"data.{key}: {error}") from error


def record_data(folder: RunFolder, data: DataConfig) -> None:
    """Write records of the corpora, and the tokenizer, into the folder of a run that begins.

    Raises OSError if a file cannot be written.
    """
    for key, name in _RECORDS.items():
        if getattr(data, key) is not None:
            corpus_of(data, key).record(folder.data / name, with_tokenizer=key == "manifest")


def training_corpus(folder: RunFolder, config: RunConfig) -> Corpus:
    """The corpus that a run was trained on: its record in the run's folder, if there is one."""
    recorded = recorded_corpus(folder, "manifest")
    if recorded is None:
        help_ = f"put the manifest and its tokenizer into {folder.data / 'train'}"
        check_named(config, folder.path, ["data.manifest"], help_)
        return corpus_of(config.data)
    return recorded


def check_same_data(
    folder: RunFolder, data: DataConfig, before: DataConfig, *, may_be_gone: bool
) -> None:
    """Raise ConfigError if these are not the data that a run has begun with.

    Data that were moved are the same if their hashes are.

    Args:
        folder: of the run. One that holds no records of corpora is not checked.
        data: to be read now.
        before: as the folder's config has it.
        may_be_gone: accept that data can no longer be read where `before` says they are.
    """
    if recorded_corpus(folder, "manifest") is None:
        return
    for key in _RECORDS:
        recorded, location = recorded_corpus(folder, key), getattr(data, key)
        if recorded is None or location is None:
            if (recorded is None) != (location is None):
                raise ConfigError(
                    f"data.{key}: found {location or 'null'}, wanted "
                    f"{getattr(before, key) or 'null'} as in {folder.config_file}"
                )
            continue
        try:
            found = corpus_of(data, key)
        except OSError as error:
            if may_be_gone and location == getattr(before, key):
                continue
            raise ConfigError(f"data.{key}: {error}") from error
        if difference := found.differs(recorded):
            raise ConfigError(f"data.{key}: {difference}")


def with_moved_data(
    folder: RunFolder, config: RunConfig, location: str
) -> tuple[RunConfig, set[str]]:
    """The config with the places where the run's data are now, and the keys that name them.

    Args:
        folder: of the run.
        config: of the run.
        location: of a corpus, or of a folder with a corpus in each of its folders.

    Raises:
        ValueError: it has none of the run's data.
    """
    found = find_corpora(location)
    moved: dict[str, str] = {}
    differences = []
    for key in _RECORDS:
        recorded = recorded_corpus(folder, key)
        if recorded is None:
            continue
        for corpus in found:
            if difference := corpus.differs(recorded):
                differences.append(difference)
            else:
                moved[key] = corpus.location
                break
    if not moved:
        cause = f"found no manifest.json in {at_home(location)}, wanted the shards of {folder.path}"
        raise ValueError(f"--data: {differences[-1] if differences else cause}")
    data = dataclasses.replace(config.data, **moved)  # type: ignore[arg-type]
    return dataclasses.replace(config, data=data), {f"data.{key}" for key in moved}


@contextmanager
def moved_data_are_explained(key: str) -> Iterator[None]:
    """Context in which a corpus that is not there is bad input, with the option that helps."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"data.{key}: {error}; `longhaul evaluate --data FOLDER` reads moved data"
        ) from error


def recorded_corpus(folder: RunFolder, key: str) -> Corpus | None:
    """The record of the corpus that a key of DataConfig names, None if the folder has none."""
    try:
        return load_corpus(folder.data / _RECORDS[key])
    except FileNotFoundError:
        return None
