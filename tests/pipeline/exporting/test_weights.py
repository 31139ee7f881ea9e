"""Weights that ranks have written in pieces, and the shards of an export."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longhaul.pipeline.architectures.architecture import Place
from longhaul.pipeline.checkpoints.integrity import checksum, write_state_and_checksums
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.exporting import weights

Piece = tuple[str, Tensor, Sequence[int]]


def checkpoint_of(folder: Path, ranks: Sequence[Sequence[Piece]]) -> SavedCheckpoint:
    """A checkpoint whose ranks wrote these pieces: a tensor's name, numbers and offset."""
    folder.mkdir()
    files = {}
    for rank, pieces in enumerate(ranks):
        placed = {f"model/{name}": {"saved_offsets": offset} for name, _, offset in pieces}
        path = folder / f"model-{rank:05d}-000.safetensors"
        tensors = {f"model/{name}": piece.contiguous() for name, piece, _ in pieces}
        save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(placed)})
        files[path.name] = checksum(path)
    write_state_and_checksums(folder, {}, files)
    return SavedCheckpoint(folder, "model")


def test_pieces_become_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = torch.randn(7, 5), torch.randn(4, 6, 3)
    half, flat, number = torch.randn(3).bfloat16(), torch.randn(9), torch.tensor(0.5)
    ranks = [
        [
            ("rows", rows[:4], (0, 0)),
            ("columns", columns[:, :2], (0, 0, 0)),
            ("half", half, (0,)),
            ("flat", flat[:5], (0,)),
            ("number", number, ()),
        ],
        [
            ("rows", rows[4:], (4, 0)),
            ("columns", columns[:, 2:], (0, 2, 0)),
            ("flat", flat[5:], (5,)),
        ],
    ]
    wanted = {"rows": rows, "columns": columns, "half": half, "flat": flat, "number": number}
    saved = checkpoint_of(tmp_path / "saved", ranks)
    # Three rows of `rows` at a time: a block of both ranks is among them.
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 60)
    files = weights.write_shards(tmp_path, saved, {name: Place(name) for name in wanted}, 200)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_rows_and_columns_of_what_two_ranks_have_written(tmp_path: Path) -> None:
    whole = torch.randn(12, 5)
    places = {
        "rows": Place("w", ((4, 8), (0, 2), (10, None))),
        "columns": Place("w", is_transposed=True),
    }
    for name, pieces in (
        ("rows", [(whole[:7], (0, 0)), (whole[7:], (7, 0))]),
        ("columns", [(whole[:, :2], (0, 0)), (whole[:, 2:], (0, 2))]),
    ):
        saved = checkpoint_of(tmp_path / name, [[("w", *piece)] for piece in pieces])
        (file,) = weights.write_shards(tmp_path, saved, places, 1 << 20)
        found = load_file(file)
        assert torch.equal(found["rows"], torch.cat([whole[4:8], whole[:2], whole[10:]]))
        assert torch.equal(found["columns"], whole.T)
