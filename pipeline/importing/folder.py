"""Makes a run of a folder in transformers' layout: its config, tokenizer and one checkpoint."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from longhaul.configs import RunConfig
from longhaul.configs.schema import TrainerConfig
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.shards import Block, new_shard
from longhaul.datamodules.tokenizer import FileTokenizer, Tokenizer
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import OptimConfig
from longhaul.modules.progress import Progress
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.runs.done import Finished
from longhaul.pipeline.runs.exported import (
    exported_context,
    exported_model,
    exported_tokenizer,
    exported_type,
    read_weights,
)
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder

_SHARD = "no-data-000000.tar"
# The block of bos tokens is in memory.
_MOST_CONTEXT = 1 << 24


def import_folder(source: str | Path, destination: str | Path) -> Path:
    """Write the run folder of a model, complete or not at all.

    The run is finished, after no update. Its data are a single block of bos tokens, since those of
    the model's training are unknown.

    Args:
        source: a folder with config.json, safetensors and a tokenizer, of an architecture that
            longhaul has a table of, or one of `longhaul export`.
        destination: a folder that does not exist yet, or is empty.

    Returns:
        The checkpoint.

    Raises:
        ValueError: naming what is missing, damaged, unknown, or cannot be expressed.
        OSError: the folder cannot be written.
    """
    folder = Path(source)
    target = new_or_empty_folder(destination)
    model, tokenizer = exported_model(folder), exported_tokenizer(folder)
    context = exported_context(folder)
    if context > _MOST_CONTEXT:
        raise ValueError(
            f"{folder}: found a context of {context:,} tokens, wanted at most {_MOST_CONTEXT:,}"
        )
    if tokenizer.vocab_size > model.vocabulary:
        raise ValueError(
            f"{folder}: found {tokenizer.vocab_size:,} ids of the tokenizer, wanted at most "
            f"{model.vocabulary:,}, the rows of the embedding"
        )
    with atomic_folder(target) as temporary:
        run = RunFolder(temporary)
        corpus = _write_tokenizer(run.data / "train", tokenizer, context, exported_type(folder))
        run.record_start(_config(target, model, context, run.data / "train"))
        checkpoint = _write_checkpoint(run.checkpoints, folder, model, corpus)
        # With its budget, since there are no moments to go on with.
        run.mark_finished(Finished(step=0, tokens=context, is_tracked=True))
    return target / checkpoint.relative_to(temporary)


def _config(target: Path, model: LanguageModelConfig, context: int, data: Path) -> RunConfig:
    """A config that says what is known; the rest says nothing of how the model was trained."""
    return RunConfig(
        name=target.name,
        root=str(target.parent),
        model=model,
        data=DataConfig(manifest=str(data), context=context),
        optim=OptimConfig(tokens_per_update=context),
        trainer=TrainerConfig(max_tokens=context, micro_batch=1),
    )


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int, model_type: str) -> Corpus:
    """The corpus of a block of bos tokens, with the tokenizer beside it."""
    folder.mkdir(parents=True)
    if isinstance(tokenizer, FileTokenizer):
        write_atomically(folder / tokenizer.name, tokenizer.content)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    block = Block(np.full(context, tokenizer.bos_id, dtype))
    with new_shard(folder / _SHARD, 0, [block], tokenizer.vocab_size) as entry:
        pass
    manifest = Manifest(
        **tokenizer.identity,
        document_tokens=context,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        source={"imported": model_type, "data": "those of its training are unknown"},
        shards=(entry,),
        location=str(folder),
    )
    manifest.save(folder)
    return Corpus(manifest)


def _finite_weights(source: Path, config: LanguageModelConfig) -> Iterator[tuple[str, Tensor]]:
    for name, one in read_weights(source, config):
        if not one.isfinite().all():
            raise ValueError(f"{source}: {name}: found values that are not finite, wanted numbers")
        yield f"model/{name}", one.float()


def _write_checkpoint(
    folder: Path, source: Path, config: LanguageModelConfig, corpus: Corpus
) -> Path:
    """The checkpoint of step 0, in float32, which holds numbers of 32 and 16 bits exactly."""
    num_bytes = sum(one.nbytes for one in build_on_meta(config).state_dict().values())
    weights = _finite_weights(source, config)
    state = {
        "progress": dataclasses.asdict(Progress()),
        "shards_sha256": corpus.fingerprint_at(0),
    }
    return CheckpointStore(folder, keep_last=1).write(0, num_bytes, weights, state)
