"""Checks of what one run needs: space, its tracking server, its shards, as many nodes."""

import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from longhaul.configs import RunConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.shards import ShardError, check_file
from longhaul.datamodules.urls import is_remote, local_path
from longhaul.pipeline.finding import Finding
from longhaul.pipeline.run_folder import RunFolder
from longhaul.pipeline.sizes import in_bytes, without_memory

_HASHED = 3
_SECONDS_OF_HASHING = 4.0
_SECONDS_FOR_AN_ANSWER = 5.0
# What a checkpoint is written with where the disk is as slow as a check lets pass.
_SLOWEST_WRITING = 100e6


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights and two moments, in float32."""
    return 12 * without_memory(config.model).num_parameters()


def seconds_to_stop(config: RunConfig) -> float:
    """A stop, and a checkpoint on a slow disk."""
    return config.trainer.stop_seconds + checkpoint_bytes(config) / _SLOWEST_WRITING


def check_space(config: RunConfig) -> Finding:
    """Room for two checkpoints: a new one is whole before an old one goes."""
    folder = RunFolder.of(config).path
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, one = shutil.disk_usage(existing).free, checkpoint_bytes(config)
    if free >= 2 * one:
        return Finding("ok", "space", f"two checkpoints of {in_bytes(one)} fit")
    text = f"{in_bytes(free)} free in {folder}, wanted two checkpoints of {in_bytes(one)}"
    return Finding("FAILURE", "space", text, "make room, or set root to another folder")


def check_tracking(config: RunConfig) -> Finding:
    """That MLflow can be reached; a run goes on without, hence no failure."""
    uri = config.tracking.uri
    waiting = "metrics wait in logs/metrics.jsonl until it does; or set tracking.uri"
    if uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///")).absolute()
        existing = next(one for one in (path, *path.parents) if one.exists())
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
    deadline = time.monotonic() + _SECONDS_OF_HASHING
    sets, told = [config.data.manifest], []
    if config.data.validation_manifest is not None:
        sets.append(config.data.validation_manifest)
    for location in sets:
        try:
            manifest = load_manifest(location)
        except (OSError, ValueError) as error:
            return Finding("FAILURE", "shards", str(error), "set data.manifest, or prepare it")
        if manifest.vocab_size > config.model.vocabulary:
            text = f"{location} has {manifest.vocab_size} ids"
            remedy = f"set model.vocabulary, {config.model.vocabulary} now"
            return Finding("FAILURE", "shards", text, remedy)
        if is_remote(manifest.location):
            told.append(f"{len(manifest.shards)} remote ones, none read")
            continue
        bad, hashed = _bad_shards(manifest, first, deadline)
        if bad:
            return _judge(bad, len(manifest.shards), config)
        told.append(f"{len(manifest.shards)} of the right size, {hashed} of the right hash")
    return Finding("ok", "shards", "; ".join(told))


def _judge(bad: list[str], count: int, config: RunConfig) -> Finding:
    text = bad[0] if len(bad) == 1 else f"{bad[0]}, and {len(bad) - 1} more"
    is_replaced = config.data.on_bad_shard == "replace"
    if is_replaced and len(bad) <= config.data.max_bad_fraction * count:
        return Finding("warning", "shards", text, "it is replaced by the next one")
    remedy = "`longhaul prepare` writes it again, data.on_bad_shard=replace goes on without"
    return Finding("FAILURE", "shards", text, remedy)


def _bad_shards(manifest: Manifest, first: int, deadline: float) -> tuple[list[str], int]:
    """What is wrong with each bad shard, and how many hashes were compared."""
    bad, good = [], []
    for entry in manifest.shards:
        path = local_path(manifest.url_of(entry.name))
        try:
            size = path.stat().st_size
        except OSError as error:
            bad.append(f"shard {path}: {error.strerror}")
            continue
        if size != entry.bytes:
            bad.append(f"shard {path}: {size} bytes, wanted {entry.bytes}")
        else:
            good.append((path, entry))
    hashed = 0
    for index in range(min(_HASHED, len(good))):
        if time.monotonic() > deadline:
            break
        # Spread over the set, and each node begins at another.
        path, entry = good[(first + index * max(1, len(good) // _HASHED)) % len(good)]
        try:
            check_file(path, entry)
        except ShardError as error:
            bad.append(str(error))
        hashed += 1
    return bad, hashed


def check_shape(config: RunConfig, nodes: int) -> Finding:
    """As many nodes as the run is laid out for."""
    if nodes == config.trainer.nodes:
        return Finding("ok", "shape", f"{nodes} nodes, as trainer.nodes has it")
    text = f"{nodes} nodes in the allocation, trainer.nodes wants {config.trainer.nodes}"
    return Finding("FAILURE", "shape", text, "set trainer.nodes, or sbatch --nodes")
