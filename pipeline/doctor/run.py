"""Checks of what one run needs: its tracking server, its shards, as many nodes."""

import hashlib
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from longhaul.configs import RunConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.urls import is_remote, local_path
from longhaul.pipeline.doctor.finding import Fault, Finding
from longhaul.pipeline.doctor.machine import nearest_existing
from longhaul.pipeline.planning.sizes import without_memory

_HASHED = 3
_SECONDS_OF_READING = 5.0
_SECONDS_FOR_AN_ANSWER = 5.0
# What a checkpoint is written with where the disk is as slow as a check lets pass.
_SLOWEST_WRITING = 100e6


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights and two moments, in float32."""
    return 12 * without_memory(config.model).num_parameters()


def seconds_to_stop(config: RunConfig) -> float:
    """A stop, and a checkpoint on a slow disk."""
    return config.trainer.stop_seconds + checkpoint_bytes(config) / _SLOWEST_WRITING


def check_tracking(config: RunConfig) -> Finding:
    """That MLflow can be reached; a run goes on without, hence no failure."""
    uri = config.tracking.uri
    waiting = "metrics wait in logs/metrics.jsonl until it does; or set tracking.uri"
    if uri.startswith("sqlite:///"):
        existing = nearest_existing(Path(uri.removeprefix("sqlite:///")))
        if os.access(existing, os.W_OK):
            return Finding("ok", "tracking", f"{uri} can be written")
        return Finding("warning", "tracking", f"{existing} cannot be written", "set tracking.uri")
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_SECONDS_FOR_AN_ANSWER):
            return Finding("ok", "tracking", f"{uri} answers")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):  # It wants a password, or is a service without /health.
            return Finding("ok", "tracking", f"{uri} answers, with status {error.code}")
        return Finding("warning", "tracking", f"{uri} answers with status {error.code}", waiting)
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Finding("warning", "tracking", f"{uri} does not answer: {reason}", waiting)


def check_shards(config: RunConfig, first: int) -> Finding:
    """Sizes of all shards, and the hashes of some.

    Args:
        first: which shard is hashed first; different nodes take different ones.
    """
    end = time.monotonic() + _SECONDS_OF_READING
    sets, told = [config.data.manifest], []
    if config.data.validation_manifest is not None:
        sets.append(config.data.validation_manifest)
    for location in sets:
        fault: Fault
        try:
            manifest = load_manifest(location)
        except (FileNotFoundError, ValueError) as error:
            # One that is not there may be on a mount that only this node lacks.
            fault = "either" if isinstance(error, FileNotFoundError) else "input"
            remedy = "set data.manifest, or prepare it"
            return Finding("FAILURE", "shards", str(error), remedy, fault)
        if manifest.vocab_size > config.model.vocabulary:
            text = f"{location} has {manifest.vocab_size} ids"
            remedy = f"set model.vocabulary, {config.model.vocabulary} now"
            return Finding("FAILURE", "shards", text, remedy, "input")
        if is_remote(manifest.location):
            told.append(f"{len(manifest.shards)} remote ones, none read")
            continue
        unfit, damaged, sized, hashed = _bad_shards(manifest, first, end)
        if unfit or damaged:
            # All nodes compare all sizes, but each of them hashes other shards.
            fault = "either" if unfit else "input"
            return _judge([*unfit, *damaged], len(manifest.shards), config, fault)
        of_all = "" if sized == len(manifest.shards) else f" of {len(manifest.shards)}"
        told.append(f"{sized}{of_all} of the right size, {hashed} of the right hash")
    return Finding("ok", "shards", "; ".join(told))


def _judge(bad: list[str], count: int, config: RunConfig, fault: Fault) -> Finding:
    text = bad[0] if len(bad) == 1 else f"{bad[0]}, and {len(bad) - 1} more"
    is_replaced = config.data.on_bad_shard == "replace"
    if is_replaced and len(bad) <= config.data.max_bad_fraction * count:
        return Finding("warning", "shards", text, "it is replaced by the next one")
    remedy = "`longhaul prepare` writes it again, data.on_bad_shard=replace goes on without"
    return Finding("FAILURE", "shards", text, remedy, fault)


def _bad_shards(
    manifest: Manifest, first: int, end: float
) -> tuple[list[str], list[str], int, int]:
    """What is wrong with each shard that is absent or of another size, and with each of another
    hash; how many sizes, and hashes, could be compared in time.
    """
    unfit, damaged, good = [], [], []
    for entry in manifest.shards:
        if time.monotonic() > end - _SECONDS_OF_READING / 2:
            break
        path = local_path(manifest.url_of(entry.name))
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            unfit.append(f"shard {path}: {error.strerror}")
            continue
        if size != entry.bytes:
            unfit.append(f"shard {path}: {size} bytes, wanted {entry.bytes}")
        else:
            good.append((path, entry))
    sized, hashed = len(unfit) + len(good), 0
    for index in range(min(_HASHED, len(good))):
        # Spread over the set, and each node begins at another.
        path, entry = good[(first + index * max(1, len(good) // _HASHED)) % len(good)]
        found = _hash(path, end)
        if found is None:
            break
        hashed += 1
        if found != entry.sha256:
            damaged.append(f"shard {path}: sha256 is {found}, wanted {entry.sha256}")
    return unfit, damaged, sized, hashed


def _hash(path: Path, end: float) -> str | None:
    """None where there was no time for all of it."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            if time.monotonic() > end:
                return None
            sha256.update(block)
    return sha256.hexdigest()


def check_shape(config: RunConfig, allocated: int, in_step: int) -> Finding:
    """As many nodes as the run is laid out for.

    Args:
        allocated, in_step: nodes of the job, and of this step of it; a run may have either.
    """
    wanted = config.trainer.nodes
    if wanted in (allocated, in_step):
        return Finding("ok", "shape", f"{wanted} nodes, as trainer.nodes has it")
    text = f"{allocated} nodes in the allocation, trainer.nodes wants {wanted}"
    return Finding("FAILURE", "shape", text, "set trainer.nodes, or sbatch --nodes", "input")
