"""Writes a checkpoint as a folder that transformers loads without longhaul."""

from pathlib import Path
from typing import Literal

from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.architectures.architecture import Place
from longhaul.pipeline.architectures.registry import architecture_of
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.exporting.card import write_card
from longhaul.pipeline.exporting.check import check_export
from longhaul.pipeline.exporting.model_files import write_model_files
from longhaul.pipeline.exporting.source import model_code
from longhaul.pipeline.exporting.tokenizer_files import check_exportable, write_tokenizer
from longhaul.pipeline.exporting.transformers_check import check_loadable
from longhaul.pipeline.exporting.weights import write_shards
from longhaul.pipeline.runs.data import training_corpus
from longhaul.pipeline.runs.folder import RunFolder, locate, stored_config
from longhaul.pipeline.runs.trained_model import read_checkpoint
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder

_SHARD_BYTES = 5_000_000_000

Form = Literal["auto", "longhaul"]
"""auto: an architecture of transformers where one expresses the model; longhaul: its own code."""


def export(
    run_or_checkpoint: str | Path,
    destination: str | Path,
    *,
    form: Form = "auto",
    shard_bytes: int = _SHARD_BYTES,
) -> list[Path]:
    """Write a checkpoint, or a run's newest one, as a Hugging Face folder, complete or not at all.

    Args:
        run_or_checkpoint: the path of either.
        destination: a folder that does not exist yet, or is empty.
        form: what loads the folder.
        shard_bytes: most bytes per safetensors shard, unless a single tensor is larger.

    Returns:
        The files written.

    Raises:
        ValueError: there is no such checkpoint, the destination holds something or lies behind a
            link in the run folder, or a kind's code cannot be carried, or does not run without
            longhaul.
        OSError: the checkpoint is damaged, or the folder could not be written.
        RuntimeError: what was written does not compute the logits of the run's model.
    """
    locate(run_or_checkpoint)[0].check_no_link_to(destination)
    target = new_or_empty_folder(destination)

    def write(run: RunFolder, checkpoint: Path) -> None:
        _write(run, checkpoint, target, form, shard_bytes)

    read_checkpoint(run_or_checkpoint, write)
    return sorted(Path(destination).iterdir())


def _write(run: RunFolder, checkpoint: Path, target: Path, form: Form, shard_bytes: int) -> None:
    config = stored_config(run)
    corpus = training_corpus(run, config)
    tokenizer = corpus.load_tokenizer()
    check_exportable(tokenizer)
    architecture = architecture_of(config.model) if form == "auto" else None
    code = {}
    if architecture is None:
        code = model_code([config.model.attention_of(n) for n in range(config.model.layers)])
    else:
        check_loadable(architecture)
    model = build_on_meta(config.model)
    saved = SavedCheckpoint(checkpoint, "model")
    saved.check_group("model", model.state_dict())
    if architecture is None:
        places = {name: Place(name) for name in model.state_dict()}
    else:
        places = architecture.tensors(model)
    state = saved.state(TrainingState)

    with atomic_folder(target) as folder:
        write_shards(folder, saved, places, shard_bytes)
        adds_bos, pad_id = write_tokenizer(folder, tokenizer, config.model.vocabulary)
        write_model_files(folder, config, corpus, model, architecture, code, pad_id)
        parameters = sum(tensor.numel() for tensor in model.state_dict().values())
        flags = {"adds_bos": adds_bos, "brings_code": architecture is None}
        write_card(folder, run, config, checkpoint, state, corpus, parameters, **flags)
        check_export(folder, model, saved, tokenizer, architecture)
