"""Saves and loads sessions of `longhaul generate`: safetensors with JSON that names their model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save
from torch.utils import _pytree as pytree

from longhaul.configs.loader import to_dict
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import Count, Sha256, one_line, parse_json, shown
from longhaul.datamodules.native import foreign_content
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.checkpoints.tensor_header import read_header
from longhaul.pipeline.generation.decoding import Session, map_power_states
from longhaul.pipeline.runs.trained_model import TrainedModel

_KEY = "longhaul_session"
_FORMAT = 1


@dataclass(frozen=True)
class _Description:
    """What the file holds beside tensors."""

    format: Count
    of: str
    unread: Annotated[list[Count], Field(min_length=1)]
    sha256: Sha256


def origin(trained: TrainedModel) -> str:
    """What a state depends on (checkpoint, config and positions), as text with a hash."""
    positions = trained.positions
    scaled = "" if positions.name == "none" else f" {positions.factor:g}"
    content = trained.checksums + json.dumps(to_dict(trained.config.model)).encode()
    return (
        f"{trained.config.name}/{trained.checkpoint.name} (sha256 "
        f"{hashlib.sha256(content).hexdigest()[:16]}, positions {positions.name}{scaled})"
    )


def save_session(path: Path, session: Session, model_origin: str) -> None:
    """Write a session that has been read; the file is complete or absent."""
    # kv in the norm's dtype, float32, from which a session can go on in either.
    widened = map_power_states(
        lambda state: state._replace(kv=state.kv.to(state.norm.dtype)), session.state
    )
    flat, _ = pytree.tree_flatten_with_path(widened)
    # Copies, since rows of a batch share memory, which safetensors refuses.
    tensors = {
        pytree.keystr(key): part.cpu().clone(memory_format=torch.contiguous_format)
        for key, part in flat
    }
    digest = _digest(tensors, session.unread)
    described = _Description(_FORMAT, model_origin, session.unread, digest)
    write_atomically(path, save(tensors, {_KEY: json.dumps(vars(described))}))


def load_session(path: Path, model: LanguageModel, model_origin: str) -> Session:
    """The session in a file, on the model's device.

    Raises:
        ValueError: the file is no saved session, is damaged, or has another origin than the model.
    """
    try:
        header = read_header(path)
        if _KEY not in header.metadata:
            raise ValueError("found other tensors")
        described = parse_json(_Description, header.metadata[_KEY], _KEY)
        with foreign_content(path, "not readable as safetensors"):
            tensors = load_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--state: found {path}, wanted a saved state: {one_line(error)}"
        ) from None
    if described.format != _FORMAT:
        raise ValueError(f"--state: found format {described.format} in {path}, wanted {_FORMAT}")
    if _digest(tensors, described.unread) != described.sha256:
        raise ValueError(f"--state: found {path} damaged, wanted an unchanged file")
    if described.of != model_origin:
        raise ValueError(f"--state: found a state of {described.of}, wanted one of {model_origin}")
    rows = model.config.vocabulary
    if max(described.unread) >= rows:
        raise ValueError(
            f"--state: found id {max(described.unread)} in {path}, wanted ids below the model's "
            f"vocabulary, {rows}"
        )
    return Session(described.unread, _state_of(path, model, tensors))


def _state_of(path: Path, model: LanguageModel, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The state, in the structure that the model's states have, on its device."""
    device = next(model.parameters()).device
    # The structure is the same for every state of the model. Sizes that grow differ between these.
    _, short = model.prefill(torch.zeros(1, 1, dtype=torch.int64, device=device))
    _, long = model.prefill(torch.zeros(1, 2, dtype=torch.int64, device=device))
    flat, structure = pytree.tree_flatten_with_path(short)
    wanted = {
        pytree.keystr(key): (one, two)
        for (key, one), two in zip(flat, pytree.tree_leaves(long), strict=True)
    }
    for name in sorted(tensors.keys() | wanted.keys()):
        if name not in tensors or name not in wanted or not _is_alike(tensors[name], *wanted[name]):
            found = _described(tensors.get(name))
            raise ValueError(
                f"--state: found {found} for {shown(name)} in {path}, wanted "
                f"{_described(wanted[name][0]) if name in wanted else 'nothing'}"
            )
    state: list[Any] = pytree.tree_unflatten([tensors[n].to(device) for n in wanted], structure)
    return state


def _is_alike(found: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether a tensor has the type and shape of both others; where these differ, any size."""
    if (found.dtype, found.ndim) != (one.dtype, one.ndim):
        return False
    sizes = zip(found.shape, one.shape, two.shape, strict=True)
    return all(size == a or (a != b and size > 0) for size, a, b in sizes)


def _described(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)} of {tensor.dtype}"


def _digest(tensors: dict[str, torch.Tensor], unread: list[int]) -> str:
    """Digest of the unread tokens, and of all names and bytes of tensors."""
    digest = hashlib.sha256(json.dumps(unread).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
