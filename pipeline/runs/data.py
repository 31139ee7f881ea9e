"""What a run folder keeps of its data, so that they are known again wherever they are.

`RUN/data/train` and `RUN/data/validation` hold records of the corpora, without tokens; the first
one holds the tokenizer too, if that is a file, and the weights of several sources.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.config import DataConfig, ManifestKey, key_of
from longhaul.datamodules.corpus import SOURCES_NAME, Corpus, corpus_of, find_corpora, load_record
from longhaul.datamodules.mixture import MixtureOrder, Order, Stage
from longhaul.datamodules.urls import at_home, is_remote
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.named_keys import check_named

# The folder in RUN/data of each key of the config that names a corpus.
_RECORDS: dict[ManifestKey, str] = {"manifest": "train", "validation_manifest": "validation"}


def check_run(config: RunConfig) -> None:
    """Raise ConfigError if a run of that name is another one, or if there are no such data.

    For a run that another process will begin, to which remote data are left.
    """
    folder, data = RunFolder.of(config), config.data
    folder.check_same_run(config)
    for key in _RECORDS:
        places = data.manifests(key)
        if not places or any(map(is_remote, places.values())):
            continue
        try:
            corpus = present_corpus(folder, data, key)
            if key == "manifest":
                order = corpus.training_order(
                    data.context, 0, data.shuffle_shards, config.samples_per_update
                )
                check_epochs(config, corpus, order)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(_named(error, _keys(data, key))) from error


def check_epochs(config: RunConfig, corpus: Corpus, order: Order) -> None:
    """Raise ConfigError if the budget needs more epochs of a source than its `max_epochs`."""
    if not isinstance(order, MixtureOrder):
        return
    sources, context = config.data.sources, config.data.context
    there = order.samples_per_source.tolist()
    most = [
        math.inf if (limit := sources[name].max_epochs) is None else math.floor(limit * samples)
        for name, samples in zip(corpus.names, there, strict=True)
    ]

    def too_many(updates: int) -> int | None:
        """The first source of which so many updates need more than there is."""
        counts = order.counts(updates * config.samples_per_update).tolist()
        return next((i for i, count in enumerate(counts) if count > most[i]), None)

    found = too_many(config.num_updates)
    if found is None:
        return
    fitting = bisect.bisect_left(
        range(config.num_updates), True, key=lambda n: too_many(n + 1) is not None
    )
    needed = order.counts(config.num_updates * config.samples_per_update).tolist()[found] * context
    name = corpus.names[found]
    raise ConfigError(
        f"data.sources.{name}: {needed:,} of its tokens are needed for trainer.max_tokens, there "
        f"are {there[found] * context:,} x max_epochs {sources[name].max_epochs:g}; "
        f"trainer.max_tokens={fitting * config.optim.tokens_per_update} trains at most"
    )


def record_data(folder: RunFolder, data: DataConfig) -> None:
    """Write records of the corpora, and the tokenizer, into the folder of a run that begins.

    Raises OSError if a file cannot be written.
    """
    for key, name in _RECORDS.items():
        if data.manifests(key):
            corpus = present_corpus(folder, data, key)
            corpus.record(folder.data / name, with_tokenizer=key == "manifest")


def copy_records(source: RunFolder, target: RunFolder) -> None:
    """Write what a run folder records of its data, and the tokenizer, into another folder.

    Raises OSError if a file cannot be written.
    """
    for key, name in _RECORDS.items():
        if (corpus := recorded_corpus(source, key)) is not None:
            corpus.record(target.data / name, with_tokenizer=key == "manifest")


def present_corpus(folder: RunFolder, data: DataConfig, key: ManifestKey) -> Corpus:
    """The corpus that a key names now, with the stages that its sources have had before."""
    corpus, recorded = corpus_of(data, key), recorded_corpus(folder, key)
    return corpus if recorded is None else corpus.continuing(recorded)


def _named(error: Exception, key: str) -> str:
    """The message of an error, which begins with a key: that of a source begins with its own."""
    return str(error) if str(error).startswith("data.") else f"{key}: {error}"


def _keys(data: DataConfig, key: ManifestKey) -> str:
    """What the message about a corpus begins with."""
    return "data.sources" if "" not in data.manifests(key) and data.sources else f"data.{key}"


def training_corpus(folder: RunFolder, config: RunConfig) -> Corpus:
    """The corpus that a run was trained on: its record in the run's folder, if there is one."""
    recorded = recorded_corpus(folder, "manifest")
    if recorded is None:
        help_ = f"put the manifest and its tokenizer into {folder.data / 'train'}"
        check_named(config, folder.path, ["data.manifest", "data.sources."], help_)
        return corpus_of(config.data)
    return recorded


def check_same_data(
    folder: RunFolder,
    data: DataConfig,
    before: DataConfig,
    trained: int = 0,
    *,
    may_be_gone: bool,
) -> None:
    """Raise ConfigError if these are not the data that a run has begun with.

    Data that were moved are the same if their hashes are.

    Args:
        folder: of the run. One that holds no records of corpora is not checked.
        data: to be read now.
        before: as the folder's config has it.
        trained: tokens of the newest checkpoint, until which weights stay what they were.
        may_be_gone: accept that data can no longer be read where `before` says they are.
    """
    if recorded_corpus(folder, "manifest") is None:
        return
    for key in _RECORDS:
        recorded, places = recorded_corpus(folder, key), data.manifests(key)
        where = _keys(data, key)
        if recorded is None or not places:
            if (recorded is None) != (not places):
                found, wanted = (
                    ", ".join(one.manifests(key).values()) or "null" for one in (data, before)
                )
                raise ConfigError(
                    f"{where}: found {found}, wanted {wanted} as in {folder.config_file}; "
                    "give the new run another name"
                )
            continue
        try:
            found_corpus = corpus_of(data, key)
        except OSError as error:
            if may_be_gone and places == before.manifests(key):
                continue
            raise ConfigError(_named(error, where)) from error
        if difference := found_corpus.differs(recorded):
            raise ConfigError(f"{where}: {difference}")
        if found_corpus.has_names and key == "manifest":
            _check_weights(data, found_corpus, recorded, trained, folder)


def _check_weights(
    data: DataConfig, found: Corpus, recorded: Corpus, trained: int, folder: RunFolder
) -> None:
    """Raise ConfigError if weights change other than `data.from_tokens` allows."""
    try:
        now = found.continuing(recorded)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if data.from_tokens is None and now.stages != recorded.stages:
        have, had = (_shown_weights(one.stages[0].weights) for one in (now, recorded))
        difference = f"found weights {have}, wanted {had}"
        if have == had:
            later, earlier = (_shown_stages(one.stages[1:]) for one in (now, recorded))
            difference = f"found {later}, wanted {earlier}"
        raise ConfigError(
            f"data.sources: {difference} as in {folder.data / _RECORDS['manifest'] / SOURCES_NAME};"
            " repeat what the command line has set before, or "
            f"data.from_tokens={max(trained, 1)} lets others hold from there on"
        )
    if now.fingerprint_at(trained) != recorded.fingerprint_at(trained):
        raise ConfigError(
            f"data.from_tokens: found {data.from_tokens}, wanted {trained} or more: so many tokens "
            f"of {folder.path} are trained"
        )


def _shown_stages(stages: Sequence[Stage]) -> str:
    """The weights after the first ones."""
    shown = (f"{_shown_weights(one.weights)} from {one.at_tokens} tokens on" for one in stages)
    return "; ".join(shown) or "no change of weights"


def _shown_weights(weights: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())


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
    data, keys, differences = config.data, set[str](), list[str]()
    for key in _RECORDS:
        recorded = recorded_corpus(folder, key)
        if recorded is None:
            continue
        found = find_corpora(location, levels=2 if recorded.has_names else 1)
        moved = {}
        for name, source in recorded.each.items():
            for corpus in found:
                if difference := corpus.differs(source):
                    differences.append(difference)
                else:
                    moved[name] = corpus.location
                    break
        data = data.with_manifests(key, moved)
        keys |= {key_of(name, key) for name in moved}
    if not keys:
        cause = f"found no manifest.json in {at_home(location)}, wanted the shards of {folder.path}"
        raise ValueError(f"--data: {differences[-1] if differences else cause}")
    return dataclasses.replace(config, data=data), keys


@contextmanager
def moved_data_are_explained(key: str) -> Iterator[None]:
    """Context in which a corpus that is not there is bad input, with the option that helps."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"data.{key}: {error}; `longhaul evaluate --data FOLDER` reads moved data"
        ) from error


def recorded_corpus(folder: RunFolder, key: ManifestKey) -> Corpus | None:
    """The record of the corpus that a key of DataConfig names, None if the folder has none."""
    try:
        return load_record(folder.data / _RECORDS[key])
    except (FileNotFoundError, NotADirectoryError):
        return None
