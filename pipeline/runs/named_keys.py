"""Which keys of a run's config may hold only what the user has named (datamodules/named.py)."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.config import MANIFEST_KEYS, key_of
from longhaul.datamodules.files.untrusted import shown
from longhaul.datamodules.named import Place, is_named, is_named_store, list_file
from longhaul.datamodules.urls import is_remote

READ = ("data.",)
"""Sections of a config that a command uses which reads the data of a run."""

TRAINED = (*READ, "tracking.")
"""Those of a command that trains."""

SUBMITTED = (*TRAINED, "slurm.")
"""Those of a command that queues a job."""

# Amounts, and words of a fixed list.
_HARMLESS = ("time", "gpu", "memory", "then")


def check_named(
    config: RunConfig,
    folder: Path,
    sections: Sequence[str],
    remedy: str,
    typed: Collection[str] = (),
) -> None:
    """Raise ConfigError at what the config of a run folder may not say.

    Args:
        folder: of the run.
        sections: beginnings of the keys that are checked.
        remedy: what the user may do, for the message; KEY in it stands for the key.
        typed: keys whose values do not come from the run folder.
    """
    data = config.data
    is_cache_used = any(
        is_remote(one) for key in MANIFEST_KEYS for one in data.manifests(key).values()
    )
    for key, places in places_to_name(config, sections).items():
        if key in typed or (key == "data.cache_dir" and not is_cache_used):
            continue
        for place in places:
            if key == "tracking.uri" and is_named_store(config.tracking.uri, folder):
                continue
            if not is_named(place):
                found = shown(place if isinstance(place, str) else place[1])
                raise ConfigError(
                    f"{key}: found {found} in the config of {folder}, wanted a path, or what "
                    f"{list_file()} names; {remedy.replace('KEY', key)} (docs/safety.md)"
                )


def places_to_name(config: RunConfig, sections: Sequence[str]) -> dict[str, list[Place]]:
    """By key, what a config has that the config of someone else's run may not bring in."""
    data = config.data
    places: dict[str, list[Place]] = {
        **{
            key_of(name, key): [place]
            for key in MANIFEST_KEYS
            for name, place in data.manifests(key).items()
        },
        "data.cache_dir": (
            [("data.cache_dir", os.path.realpath(data.cache_dir))] if data.cache_dir else []
        ),
        "tracking.uri": [config.tracking.uri],
    }
    for name, value in vars(config.slurm).items():
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and name not in _HARMLESS:
            places[f"slurm.{name}"] = [(f"slurm.{name}", one) for one in values]
    return {key: some for key, some in places.items() if key.startswith(tuple(sections))}


def places_of_job(config: RunConfig, run: Path) -> list[Place]:
    """What the user has named in queueing a run, so that its jobs need no list of their own.

    A database that its place alone allows stays one that nobody has named.
    """
    return [
        place
        for some in places_to_name(config, TRAINED).values()
        for place in some
        if is_named(place) or not (isinstance(place, str) and is_named_store(place, run))
    ]
