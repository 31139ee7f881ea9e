"""Checks of what one run needs: its tracking server, its shards, and its number of nodes."""

import hashlib
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from longhaul.configs import RunConfig
from longhaul.datamodules.config import ManifestKey
from longhaul.datamodules.corpus import Corpus, corpus_of
from longhaul.datamodules.urls import SQLITE, local_path
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import num_moments, parameter_groups
from longhaul.pipeline.doctor.finding import Fault, Finding
from longhaul.pipeline.doctor.machine_checks import nearest_existing
from longhaul.pipeline.system.waiting import ANSWER_S, READING_S

_HASHED = 3
# Bytes per second at which a checkpoint is written to a disk that barely passes the check.
_SLOWEST_DISK = 100e6


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the weights and of the optimizer's moments, in float32."""
    model = build_on_meta(config.model)
    return 4 * (model.num_parameters() + num_moments(parameter_groups(model, config.optim)))


def seconds_to_stop(config: RunConfig) -> float:
    """Seconds to stop, and to write a checkpoint to a slow disk."""
    return config.trainer.stop_seconds + checkpoint_bytes(config) / _SLOWEST_DISK


def check_tracking(config: RunConfig) -> Finding:
    """Whether MLflow can be reached; a run continues without it, hence no failure."""
    uri = config.tracking.uri
    waiting = "metrics wait in logs/metrics.jsonl until it answers; or set tracking.uri"
    if uri.startswith(SQLITE):
        existing = nearest_existing(Path(uri.removeprefix(SQLITE)))
        if os.access(existing, os.W_OK):
            return Finding("ok", "tracking", f"{uri} can be written")
        return Finding("warning", "tracking", f"{existing} cannot be written", "set tracking.uri")
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=ANSWER_S):
            return Finding("ok", "tracking", f"{uri} answers")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):  # It asks for a password, or has no /health.
            return Finding("ok", "tracking", f"{uri} answers, with status {error.code}")
        return Finding("warning", "tracking", f"{uri} answers with status {error.code}", waiting)
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Finding("warning", "tracking", f"{uri} does not answer: {reason}", waiting)


def check_shards(config: RunConfig, first: int) -> Finding:
    """Whether all shards have the right size, and some of them the right hash.

    Args:
        config: of the run.
        first: which shard is hashed first; it differs from node to node.
    """
    end = time.monotonic() + READING_S
    texts = []
    names: tuple[tuple[str, ManifestKey], ...] = (
        ("training", "manifest"),
        ("validation", "validation_manifest"),
    )
    for name, key in names:
        places = config.data.manifests(key)
        if not places:
            continue
        fault: Fault
        try:
            corpus = corpus_of(config.data, key)
        except (FileNotFoundError, ValueError) as error:
            # A missing corpus may be on a mount that only this node lacks.
            fault = "either" if isinstance(error, FileNotFoundError) else "input"
            # Which of several sources it is, the error tells.
            remedy = f"set {f'data.{key}' if '' in places else 'data.sources'}, or prepare it"
            return Finding("FAILURE", "shards", str(error), remedy, fault)
        if corpus.vocab_size > config.model.vocabulary:
            text = f"{', '.join(places.values())} has {corpus.vocab_size} ids"
            remedy = f"set model.vocabulary, {config.model.vocabulary} now"
            return Finding("FAILURE", "shards", text, remedy, "input")
        if corpus.is_remote:
            texts.append(f"{name}: {len(corpus.files)} remote shards, none read")
            continue
        unfit, damaged, sized, hashed = _bad_shards(corpus, first, end)
        if unfit or damaged:
            # All nodes compare all sizes, but each node hashes other shards.
            fault = "either" if unfit else "input"
            return _bad_shard_finding([*unfit, *damaged], len(corpus.files), config, fault)
        texts.append(
            f"{name}: {sized} of {len(corpus.files)} shards looked at, all of the right size; "
            f"{hashed} of them read, all of the right hash"
        )
    return Finding("ok", "shards", ". ".join(texts))


def _bad_shard_finding(bad: list[str], count: int, config: RunConfig, fault: Fault) -> Finding:
    text = bad[0] if len(bad) == 1 else f"{bad[0]}, and {len(bad) - 1} more"
    is_replaced = config.data.on_bad_shard == "replace"
    if is_replaced and len(bad) <= config.data.max_bad_fraction * count:
        return Finding("warning", "shards", text, "training replaces it by the next shard")
    remedy = "`longhaul prepare` writes it again, data.on_bad_shard=replace continues without it"
    return Finding("FAILURE", "shards", text, remedy, fault)


def _bad_shards(corpus: Corpus, first: int, end: float) -> tuple[list[str], list[str], int, int]:
    """Compare sizes and hashes of shards with those recorded, as far as time allows.

    Returns:
        A message for each shard that is absent or of another size; a message for each shard with
        another hash; how many sizes were compared; how many hashes were compared.
    """
    unfit, damaged, good = [], [], []
    for location, entry in corpus.files:
        if time.monotonic() > end - READING_S / 2:
            break
        path = local_path(location)
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
        # Shards spread over the whole set; each node begins with another one.
        path, entry = good[(first + index * max(1, len(good) // _HASHED)) % len(good)]
        digest = _hash(path, end)
        if digest is None:
            break
        hashed += 1
        if digest != entry.sha256:
            damaged.append(f"shard {path}: sha256 is {digest}, wanted {entry.sha256}")
    return unfit, damaged, sized, hashed


def _hash(path: Path, end: float) -> str | None:
    """The sha256 of a file; None if the time was over before its end."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            if time.monotonic() > end:
                return None
            sha256.update(block)
    return sha256.hexdigest()


def check_shape(config: RunConfig, allocated: int, in_step: int) -> Finding:
    """Whether there are as many nodes as trainer.nodes.

    Args:
        config: of the run.
        allocated: nodes of the job.
        in_step: nodes of this job step. A run may use either number of nodes.
    """
    wanted = config.trainer.nodes
    if wanted in (allocated, in_step):
        return Finding("ok", "shape", f"{wanted} nodes, as trainer.nodes says")
    text = f"{allocated} nodes in the allocation, trainer.nodes wants {wanted}"
    return Finding("FAILURE", "shape", text, "set trainer.nodes, or sbatch --nodes", "input")
