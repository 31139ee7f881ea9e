"""Parts of a sequence, each of which begins with the state that the summaries before it make."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.kernels import delta_rule
from longhaul.kernels.delta import delta_summary

T, H, G, K, V = 48, 4, 2, 6, 5


def inputs(gates: str, erases: bool) -> list[Tensor | None]:
    q, k = torch.randn(2, T, G, K), F.normalize(torch.randn(2, T, G, K), dim=-1)
    log_g = -torch.rand(2, T, H, K) if gates == "channel" else -torch.rand(2, T, H)
    beta = 2 * torch.rand(2, T, H) if erases else None
    x = (q, k, torch.randn(2, T, H, V), beta, None if gates == "none" else log_g)
    return [one if one is None else one.double() for one in x]


def in_parts(x: list[Tensor | None], start: Tensor | None, count: int, **how: Any) -> Tensor:
    """The output, where each part knows only its own tokens and the summaries of earlier parts."""
    parts = [[None] * count if one is None else one.chunk(count, dim=1) for one in x]
    every = list(zip(*parts, strict=True))
    outputs, state = [], x[2].new_zeros(2, H, K, V) if start is None else start  # type: ignore[union-attr]
    for part in every:
        M, E = delta_summary(*part[1:], **how)
        outputs.append(delta_rule(*part, initial_state=state, **how)[0])
        state = M @ state + E
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize(
    ("gates", "erases"),
    [("none", True), ("scalar", True), ("channel", True), ("channel", False), ("scalar", False)],
)
def test_parts_are_the_whole(gates: str, erases: bool, has_start: bool) -> None:
    x = inputs(gates, erases)
    if gates != "none":
        # Documents begin at an edge of parts, within one, and with the last token of one.
        x[4][:, [12, 29, 35]] = -torch.inf  # type: ignore[index]
    start = torch.randn(2, H, K, V, dtype=torch.float64) if has_start else None
    leaves = [one.requires_grad_() for one in (*x, start) if one is not None]
    wanted, _ = delta_rule(*x, initial_state=start, backend="reference")  # type: ignore[arg-type]
    gradients = torch.autograd.grad(wanted.sin().sum(), leaves)
    for count in (2, 3, 4):
        found = in_parts(x, start, count, chunk_size=8)
        assert (found - wanted).abs().max() < 1e-12
        for one, other in zip(
            torch.autograd.grad(found.sin().sum(), leaves), gradients, strict=True
        ):
            assert (one - other).abs().max() < 1e-11


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_summary_is_the_product_of_the_tokens(backend: Any) -> None:
    _, k, v, beta, log_g = inputs("channel", erases=True)
    assert k is not None
    assert v is not None
    assert beta is not None
    assert log_g is not None
    found, _ = delta_summary(k, v, beta, log_g, backend=backend)
    for b, h in ((0, 0), (1, 3)):
        wanted = torch.eye(K, dtype=torch.float64)
        for t in range(T):
            key = k[b, t, h // 2]
            erased = torch.eye(K).double() - beta[b, t, h] * torch.outer(key, key)
            wanted = erased @ torch.diag(log_g[b, t, h].exp()) @ wanted
        assert (found[b, h] - wanted).abs().max() < 1e-13


def test_a_document_within_a_part_cuts_it_off_exactly() -> None:
    _, k, v, beta, log_g = inputs("scalar", erases=True)
    log_g[:, 20] = -torch.inf  # type: ignore[index]
    M, E = delta_summary(k.float(), v.float(), beta.float(), log_g.float())  # type: ignore[union-attr]
    assert M.count_nonzero() == 0
    assert E.count_nonzero() == E.numel()
    assert M.dtype == E.dtype == torch.float32
