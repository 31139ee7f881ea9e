"""Properties that every variant must have where rows hold several documents."""

from itertools import accumulate

import pytest
import torch
from attention_cases import build, every_case_and_learned, tokens
from torch import Tensor

from longhaul.modules.documents import Documents

pytestmark = pytest.mark.usefixtures("chunks_of_16")

# Tokens of the documents of each row; chunks have 16.
PACKED = [[1, 2, 3, 15, 16, 17, 46], [100]]
NEIGHBOUR = slice(21, 37)  # the one of 16


def documents_of(x: Tensor, rows: list[list[int]]) -> Documents:
    is_first = torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, lengths in zip(is_first, rows, strict=True):
        row[torch.tensor([0, *accumulate(lengths[:-1])])] = True
    return Documents(x, is_first)


@every_case_and_learned
def test_packed_documents_are_separate(kind: str, options: dict[str, object]) -> None:
    """Outputs and all gradients, of rows whose documents differ in number and lengths."""
    attention = build(kind, options)
    x, probe = tokens(100).requires_grad_(), torch.randn_like(tokens(100))
    leaves = [x, *attention.parameters()]
    packed, _ = attention(x, documents=documents_of(x, PACKED), keep_state=False)
    rows = [
        torch.cat([attention(one, keep_state=False)[0] for one in row.split(lengths, dim=1)], 1)
        for row, lengths in zip(x.split(1), PACKED, strict=True)
    ]
    separate = torch.cat(rows)
    # Norms of heads amplify rounding errors of sums that almost cancel; so do norms over them all.
    is_amplified = kind == "zeros" or (kind == "cartan" and options.get("qk_norm") == "full")
    allowed = 1e-11 if is_amplified else 1e-12
    assert_close(packed, separate, allowed)
    gradients = (torch.autograd.grad(y, leaves, probe) for y in (packed, separate))
    for found, wanted in zip(*gradients, strict=True):
        assert_close(found, wanted, allowed)


def assert_close(found: Tensor, wanted: Tensor, allowed: float) -> None:
    assert found.isfinite().all()
    assert (found - wanted).abs().max() <= allowed * max(1, wanted.abs().max())


@every_case_and_learned
@pytest.mark.parametrize("dtype", ["float64", pytest.param("bf16", marks=pytest.mark.wide)])
def test_a_document_changes_no_bit_of_its_neighbours(
    kind: str, options: dict[str, object], dtype: str
) -> None:
    """Of their outputs and of the gradients of their inputs."""
    attention, x, probe = build(kind, options), tokens(100), torch.randn_like(tokens(100))
    factor = -1.5
    if dtype == "bf16":
        attention, x, probe, factor = attention.float(), x.float(), probe.float(), -100.0
    others = torch.ones(x.shape[:2], dtype=torch.bool)
    others[0, NEIGHBOUR] = False
    found = []
    for changed in (x, x.where(others[..., None], factor * x)):
        changed.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            y, _ = attention(changed, documents=documents_of(x, PACKED), keep_state=False)
        found.append((y, torch.autograd.grad(y, changed, probe.to(y.dtype))[0]))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


@pytest.mark.wide
@every_case_and_learned
def test_packed_documents_are_separate_in_bf16(kind: str, options: dict[str, object]) -> None:
    """Outputs and gradients of inputs are as near to exact ones as those of each document are."""
    attention, x, probe = build(kind, options), tokens(100), torch.randn_like(tokens(100))

    def results(x: Tensor, documents: Documents | None) -> list[Tensor]:
        x.requires_grad_()
        parts = [x]
        if documents is None:
            rows = zip(x.split(1), PACKED, strict=True)
            parts = [one for row, lengths in rows for one in row.split(lengths, dim=1)]
        mixed = [attention(one, documents=documents, keep_state=False)[0] for one in parts]
        y = torch.cat([one.flatten(0, 1) for one in mixed]).view_as(x)
        return [y, *torch.autograd.grad(y, x, probe.to(y.dtype))]

    exact = results(x.clone(), documents_of(x, PACKED))
    attention = attention.float()
    with torch.autocast("cpu", torch.bfloat16):
        packed, separate = (results(x.float(), one) for one in (documents_of(x, PACKED), None))
    for found, other, wanted in zip(packed, separate, exact, strict=True):
        off, usual = ((one - wanted).norm() / wanted.norm() for one in (found, other))
        assert off <= 1.5 * usual
