"""Saves and loads sessions of `longhaul generate`: safetensors with JSON that names their model."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.utils import _pytree as pytree

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.generation.decoding import Session
from longhaul.pipeline.runs.exported import shape_of
from longhaul.pipeline.runs.trained_model import TrainedModel
from longhaul.pipeline.system.files import write_atomically

_KEY = "longhaul_session"
_FORMAT = 1


def origin(trained: TrainedModel) -> str:
    """What a state depends on (checkpoint, config and positions), as text with a hash."""
    positions = trained.positions
    scaled = "" if positions.name == "none" else f" {positions.factor:g}"
    content = trained.checksums + json.dumps(shape_of(trained.config.model)).encode()
    return (
        f"{trained.config.name}/{trained.checkpoint.name} (sha256 "
        f"{hashlib.sha256(content).hexdigest()[:16]}, positions {positions.name}{scaled})"
    )


def save_session(path: Path, session: Session, model_origin: str) -> None:
    """Write a session that has been read; the file is complete or absent."""
    flat, _ = pytree.tree_flatten_with_path(session.state)
    # Copies, since rows of a batch share memory, which safetensors refuses.
    tensors = {
        pytree.keystr(key): part.cpu().clone(memory_format=torch.contiguous_format)
        for key, part in flat
    }
    described = {"format": _FORMAT, "of": model_origin, "unread": session.unread}
    described["sha256"] = _digest(tensors, session.unread)
    write_atomically(path, save(tensors, {_KEY: json.dumps(described)}))


def load_session(path: Path, model: LanguageModel, model_origin: str) -> Session:
    """The session in a file, on the model's device.

    Raises:
        ValueError: the file is no saved session, is damaged, or has another origin than the model.
    """
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            keys = ("format", "of", "unread", "sha256")
            written_format, file_origin, unread, digest = (described[key] for key in keys)
    except (KeyError, TypeError):
        raise ValueError(f"--state: found other tensors in {path}, wanted a saved state") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--state: found {path}, wanted a saved state: {error}") from None
    if written_format != _FORMAT:
        raise ValueError(f"--state: found format {written_format} in {path}, wanted {_FORMAT}")
    if _digest(tensors, unread) != digest:
        raise ValueError(f"--state: found {path} damaged, wanted an unchanged file")
    if file_origin != model_origin:
        raise ValueError(f"--state: found a state of {file_origin}, wanted one of {model_origin}")
    device = next(model.parameters()).device
    # The tree structure is the same for every state of the model.
    _, any_state = model.prefill(torch.zeros(1, 1, dtype=torch.int64, device=device))
    flat, structure = pytree.tree_flatten_with_path(any_state)
    parts = [tensors[pytree.keystr(key)].to(device) for key, _ in flat]
    return Session(unread, pytree.tree_unflatten(parts, structure))


def _digest(tensors: dict[str, torch.Tensor], unread: list[int]) -> str:
    """Digest of the unread tokens, and of all names and bytes of tensors."""
    digest = hashlib.sha256(json.dumps(unread).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
