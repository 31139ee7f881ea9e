"""What MLflow says of a run beside its config: its size, data, hardware, commit and source."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from longhaul.configs import RunConfig
from longhaul.datamodules.corpus import Corpus
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
    datasets = [_dataset(train, "training")]
    if validation is not None:
        datasets.append(_dataset(validation, "validation"))
    return Description(params, tags, tuple(datasets))


def _dataset(corpus: Corpus, context: str) -> Dataset:
    location = corpus.location
    if is_remote(location):
        source_type, source = location.partition(":")[0], without_secrets(location)
    else:
        source_type, source = "local", os.fspath(local_path(location).absolute())
    # MLflow's pages look for the address of a web page under another name.
    key = "url" if source_type in ("http", "https") else "uri"
    profile = {
        "num_tokens": corpus.num_tokens,
        "num_documents": corpus.num_blocks,
        "num_shards": len(corpus.files),
        "tokenizer": corpus.tokenizer_name,
    }
    return Dataset(
        corpus.name,
        corpus.fingerprint[:_DIGEST_CHARACTERS],
        source_type.replace("https", "http"),
        json.dumps({key: source}),
        json.dumps(profile),
        context,
    )
