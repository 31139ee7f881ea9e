"""Sessions that somebody else may have written, with a digest that fits."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from longhaul.configs import load_run_config
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.generation.decoding import Session
from longhaul.pipeline.generation.session_files import _digest, load_session, save_session

SIZES = ("model.layers=2", "model.width=16", "model.heads=2", "model.vocabulary=64")


def make_model(kind: str = "conformal_sympow") -> LanguageModel:
    return LanguageModel(load_run_config("run/demo.yaml", SIZES, kind=kind).model).eval()


def write(path: Path, model: LanguageModel, tokens: int = 3) -> None:
    session = Session([1] * tokens)
    session.read(model)
    session.unread = [5]
    save_session(path, session, "here")


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and what is said of them, and make the digest fit."""
    with safe_open(path, "pt") as file:
        described = json.loads(file.metadata()["longhaul_session"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, described)
    if isinstance(described.get("unread"), list):
        described["sha256"] = _digest(tensors, described["unread"])
    path.write_bytes(save(tensors, {"longhaul_session": json.dumps(described)}))


@pytest.mark.parametrize("kind", ["conformal_sympow", "softmax", "coca"])
def test_a_session_is_read_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    for tokens in (1, 3, 9):
        write(tmp_path / "s", model, tokens)
        session = load_session(tmp_path / "s", model, "here")
        assert session.unread == [5]
        session.read(model)


def first(tensors: dict[str, Tensor]) -> str:
    return min(tensors)


CHANGES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]] = {
    "found id 64 in .*, wanted ids below the model's vocabulary, 64": (
        lambda tensors, described: described.update(unread=[64])
    ),
    "unread.0: found -1, wanted greater": (
        lambda tensors, described: described.update(unread=[-1])
    ),
    r"unread.0: found 10+, wanted less": (
        lambda tensors, described: described.update(unread=[10**30])
    ),
    r"unread: found \[\], wanted at least 1 item": (
        lambda tensors, described: described.update(unread=[])
    ),
    "unread: found 'x', wanted a valid array": (
        lambda tensors, described: described.update(unread="x")
    ),
    "format: found nothing, wanted a value": lambda tensors, described: described.pop("format"),
    "of: found 3, wanted a valid string": lambda tensors, described: described.update(of=3),
    "found nothing for .*, wanted shape": lambda tensors, described: tensors.pop(first(tensors)),
    "found shape .* for 'extra' in .*, wanted nothing": (
        lambda tensors, described: tensors.update(extra=torch.zeros(1))
    ),
    r"found shape \(1, 99\) of .*, wanted shape": (
        lambda tensors, described: tensors.update({first(tensors): torch.zeros(1, 99)})
    ),
    "of torch.int8 for .*, wanted shape .* of torch.float": (
        lambda tensors, described: tensors.update({first(tensors): tensors[first(tensors)].char()})
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_state_is_one_line(message: str, tmp_path: Path) -> None:
    model = make_model()
    write(tmp_path / "s", model)
    rewrite(tmp_path / "s", CHANGES[message])
    with pytest.raises(ValueError, match=f"^--state: [^\n]*{message}[^\n]*$"):
        load_session(tmp_path / "s", model, "here")


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", struct.pack("<Q", 1 << 62) + b"{}", b"\x02" + bytes(7) + b"[]"]
)
def test_another_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(ValueError, match=r"^--state: found .*s, wanted a saved state: [^\n]*$"):
        load_session(tmp_path / "s", make_model(), "here")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s")
    with pytest.raises(ValueError, match="found a FIFO, wanted a regular file"):
        load_session(tmp_path / "s", make_model(), "here")
