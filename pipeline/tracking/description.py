"""What MLflow says of a run beside its config: its size, data, hardware, commit and source."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from longhaul.configs import RunConfig
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.urls import is_remote, local_path
from longhaul.pipeline.system.environment import main_device, source_commit, source_hashes
from longhaul.pipeline.terminal.numbers import amount
from longhaul.pipeline.tracking.metrics_journal import Dataset
from longhaul.pipeline.tracking.mlflow_limits import without_secrets

_DIGEST_CHARACTERS = 12  # that fit beside a name in MLflow's tables; it takes 36
DIRTY = "-dirty"
"""What the commit of a checkout ends in whose files were changed since."""


@dataclass(frozen=True)
class Description:
    """What is logged of a run when it starts."""

    params: Mapping[str, str]
    tags: Mapping[str, str]
    datasets: tuple[Dataset, ...]


def describe(
    config: RunConfig, num_parameters: int, train: Corpus, validation: Corpus | None
) -> Description:
    """Describe a run whose model has so many parameters, and the corpora that it reads."""
    commit = source_commit()
    data = train.name
    # The last update is a whole one, also where the budget ends within it.
    tokens = config.num_updates * config.optim.tokens_per_update
    params = {
        "parameters": str(num_parameters),
        "tokens": str(tokens),
        "data": data,
        "data_sha256": train.fingerprint,
        "hardware": f"{config.trainer.world_size} x {main_device()}",
        "commit": str(commit),
        # A commit says nothing of a kind's file that was changed since.
        "attention_sha256": ", ".join(
            f"{kind} {digest[:_DIGEST_CHARACTERS]}"
            for kind, digest in source_hashes(config.model.kinds).items()
        ),
    }
    tags = {
        "longhaul.attention": ",".join(config.model.kinds),
        # MLflow's own names, from which its pages fill Source, Git commit and Description.
        "mlflow.source.name": "longhaul train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": f"{', '.join(config.model.kinds)} with {amount(num_parameters)} "
        f"parameters on {amount(tokens)} tokens of {data}, "
        f"context {config.data.context:,}",
    }
    if commit is not None:
        tags["mlflow.source.git.commit"] = commit.removesuffix(DIRTY)
        tags["mlflow.source.git.dirty"] = str(commit.endswith(DIRTY)).lower()
    datasets = [
        _dataset(name, source, corpus, context)
        for corpus, context in ((train, "training"), (validation, "validation"))
        if corpus is not None
        for name, source in zip(corpus.names, corpus.sources, strict=True)
    ]
    return Description(params, tags, tuple(datasets))


def _dataset(name: str, source: Manifest, corpus: Corpus, context: str) -> Dataset:
    """A source of a corpus, which has a name where there may be several."""
    location = source.location
    if is_remote(location):
        source_type, place = location.partition(":")[0], without_secrets(location)
    else:
        source_type, place = "local", os.fspath(local_path(location).absolute())
    # MLflow's pages look for the address of a web page under another name.
    key = "url" if source_type in ("http", "https") else "uri"
    profile: dict[str, object] = {
        "num_tokens": source.num_tokens,
        "num_documents": source.num_blocks,
        "num_shards": len(source.shards),
        "tokenizer": source.tokenizer,
    }
    if weights := {one.at_tokens: one.weights.get(name, 0) for one in corpus.stages}:
        profile["weight_from_tokens"] = weights
    return Dataset(
        name or corpus.name,
        source.shards_sha256[:_DIGEST_CHARACTERS],
        source_type.replace("https", "http"),
        json.dumps({key: place}),
        json.dumps(profile),
        context,
    )
