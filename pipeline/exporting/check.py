"""Compares what an exported folder computes with what its run's model computes.

The folder's own code is imported, without transformers, which may not be installed. Weights are
read one block at a time, from the checkpoint and from the folder, so that the check of a model
needs the memory of a few blocks.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longhaul.datamodules.untrusted import one_line
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.exporting.source import file_of
from longhaul.pipeline.exporting.weights import files_of_tensors
from longhaul.pipeline.runs.exported import exported_shape

_TOKENS = 64
# Relative to the largest logit. Both sides run the same code, so that more is no rounding.
_TOLERANCE = 1e-5
_numbers = itertools.count()

Read = Callable[[str], Tensor]


def check_export(folder: Path, model: LanguageModel, saved: SavedCheckpoint) -> None:
    """Raise where the exported folder is not the model.

    Args:
        folder: with config.json, the code and the weights.
        model: the run's model, on `meta`.
        saved: the run's checkpoint.

    Raises:
        ValueError: the code does not run without longhaul.
        OSError: the weights cannot be read.
        RuntimeError: the logits of a short text differ.
    """
    kinds = ", ".join(model.config.kinds)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocabulary, (1, _TOKENS), generator=generator)
    wanted = _logits(model, tokens, lambda name: saved.read_one(f"model/{name}"))
    try:
        with _architecture(folder) as code, torch.device("meta"):
            exported = code.build_model(**exported_shape(folder))
        found = _logits(exported, tokens, _reader(folder))
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"attention.kind: found {kinds}, whose exported code does not run: "
            f"{type(error).__name__}: {error}"
        ) from error
    size = max(1.0, wanted.abs().nan_to_num().max().item())
    if not torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE * size, equal_nan=True):
        difference = (found - wanted).abs().max().item()
        raise RuntimeError(
            f"attention.kind: found logits of the exported {kinds} that differ from the run's by "
            f"{difference:.3g}, wanted at most {_TOLERANCE * size:.3g}"
        )


def _reader(folder: Path) -> Read:
    files = files_of_tensors(folder)

    def read(name: str) -> Tensor:
        path = folder / files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            # Of a class that tells it from what the kind's code may fail to read.
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error

    return read


@torch.no_grad()
def _logits(model: LanguageModel, tokens: Tensor, read: Read) -> Tensor:
    """Logits (T, V) of a model on `meta`, whose parts get weights while they run."""

    def fill(prefix: str, part: nn.Module) -> None:
        tensors = {key: read(f"{prefix}.{key}") for key in part.state_dict()}
        part.load_state_dict(tensors, assign=True)

    def empty(part: nn.Module, *_: object) -> None:
        part.to("meta")

    hooks = []
    for name, part in _parts(model):
        hooks += [
            part.register_forward_pre_hook(lambda part, _, name=name: fill(name, part)),
            part.register_forward_hook(empty),
        ]
    hidden, _ = model.eval().activations(tokens)
    for hook in hooks:
        hook.remove()
    holder = "embedding" if model.config.tied_head else "lm_head"  # of the head's matrix
    fill(holder, model.get_submodule(holder))
    logits: Tensor = model.head(hidden[0])
    empty(model.get_submodule(holder))
    return logits


def _parts(model: LanguageModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the model calls one after the other, and their names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", one) for number, one in enumerate(child))
        elif child.state_dict():
            yield name, child


@contextmanager
def _architecture(folder: Path) -> Iterator[Any]:
    """The module `architecture` of the folder, imported as a package of its own."""
    name = f"longhaul_export_{next(_numbers)}"
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[name] = module_from_spec(spec)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()
    try:
        architecture = file_of(os.listdir(folder), "architecture").removesuffix(".py")
        yield importlib.import_module(f"{name}.{architecture}")
    finally:
        sys.dont_write_bytecode = writes_none
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            del sys.modules[module]
