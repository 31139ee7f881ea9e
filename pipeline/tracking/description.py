"""What MLflow says of a run beside its config: its size, data, hardware, commit and source."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from longhaul.configs import RunConfig
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest
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
    config: RunConfig, num_parameters: int, train: Manifest, validation: Manifest | None
) -> Description:
    """Describe a run whose model has so many parameters, and the shards that it reads."""
    commit = source_commit()
    data = data_name(train)
    # The last update is a whole one, also where the budget ends within it.
    tokens = config.num_updates * config.optim.tokens_per_update
    params = {
        "parameters": str(num_parameters),
        "tokens": str(tokens),
        "data": data,
        "data_sha256": train.shards_sha256,
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


def data_name(manifest: Manifest) -> str:
    """The last two folders of the manifest's path or URL, such as `gpt2/train`."""
    location = manifest.location
    if not is_remote(location):
        location = os.fspath(local_path(location).absolute())
    # The URL may be one argument of a command.
    words = [word for word in location.split() if MANIFEST_NAME in word] or [location]
    path = re.sub(r"^[\w+.-]+://([^/@]*@)?", "", words[0]).partition(MANIFEST_NAME)[0]
    return "/".join([part for part in path.split("/") if part][-2:]) or "unknown"


def _dataset(manifest: Manifest, context: str) -> Dataset:
    location = manifest.location
    if is_remote(location):
        source_type, source = location.partition(":")[0], without_secrets(location)
    else:
        source_type, source = "local", os.fspath(local_path(location).absolute())
    # MLflow's pages look for the address of a web page under another name.
    key = "url" if source_type in ("http", "https") else "uri"
    profile = {
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "num_shards": len(manifest.shards),
        "tokenizer": manifest.tokenizer,
    }
    return Dataset(
        data_name(manifest),
        manifest.shards_sha256[:_DIGEST_CHARACTERS],
        source_type.replace("https", "http"),
        json.dumps({key: source}),
        json.dumps(profile),
        context,
    )
