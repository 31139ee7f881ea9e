"""How flash-linear-attention is called, with plain torch in place of its kernels."""

import sys
from typing import Any

import fla_in_torch
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.kernels import delta_rule
from longhaul.kernels.delta import fla

H, G, K, V = 4, 2, 6, 5


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return fla_in_torch.install(monkeypatch)


def inputs(T: int, gates: str, *, B: int = 1, erases: bool = True) -> list[Tensor | None]:
    """q, k, v, beta, log_g."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    log_g = -randn(B, T, H, K).abs()
    return [
        randn(B, T, G, K),
        F.normalize(randn(B, T, G, K), dim=-1),
        randn(B, T, H, V),
        2 * torch.rand(B, T, H, dtype=torch.float64) if erases else None,
        {"none": None, "scalar": log_g[..., 0], "channel": log_g}[gates],
    ]


def results(x: list[Tensor | None], state: Tensor | None, **how: Any) -> list[Tensor]:
    """Output, final state, and the gradients of the sum of their sines."""
    given = [one if one is None else one.detach().requires_grad_() for one in (*x, state)]
    out, after = delta_rule(*given[:5], initial_state=given[5], output_final_state=True, **how)  # type: ignore[arg-type]
    assert after is not None
    leaves = [one for one in given if one is not None]
    grads = torch.autograd.grad(out.sin().sum() + after.sin().sum(), leaves)
    return [out.detach(), after.detach(), *grads]


def assert_same(x: list[Tensor | None], state: Tensor | None, **how: Any) -> None:
    found = results(x, state, backend="fla", **how)
    for one, wanted in zip(found, results(x, state, backend="reference", **how), strict=True):
        assert torch.allclose(one, wanted, rtol=0, atol=1e-12)


KERNELS = {
    ("none", True): "delta_rule",
    ("scalar", True): "gated_delta_rule",
    ("channel", True): "kda",
    ("none", False): "simple_gla",
    ("scalar", False): "simple_gla",
    ("channel", False): "gla",
}
per_kernel = pytest.mark.parametrize(("gates", "erases"), KERNELS)


@per_kernel
def test_outputs_states_and_gradients_are_those_of_the_definition(
    gates: str, erases: bool, installed: list[str]
) -> None:
    x = inputs(9, gates, B=2, erases=erases)
    assert_same(x, torch.randn(2, H, K, V, dtype=torch.float64), scale=0.3)
    assert_same(x, None)
    assert set(installed) == {KERNELS[gates, erases]}


@per_kernel
@pytest.mark.usefixtures("installed")
def test_packed_documents(gates: str, erases: bool) -> None:
    offsets = torch.tensor([0, 1, 5, 9], dtype=torch.int32)
    state = torch.randn(3, H, K, V, dtype=torch.float64)
    assert_same(inputs(9, gates, erases=erases), state, cu_seqlens=offsets)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("gates", ["scalar", "channel"])
@pytest.mark.usefixtures("installed")
def test_gates_of_zero_begin_documents(gates: str, is_packed: bool) -> None:
    """At the first token of a row, inside of rows, twice in a row, and in one row alone."""
    x = inputs(9, gates, B=1 if is_packed else 3)
    log_g = x[4]
    assert log_g is not None
    how: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 4, 7, 9])} if is_packed else {}
    for row, token in ((0, 0), (0, 5), (0, 6)) if is_packed else ((0, 0), (0, 5), (0, 6), (2, 8)):
        log_g[row, token] = -torch.inf
    assert_same(x, torch.randn(3, H, K, V, dtype=torch.float64), **how)
    assert_same(x, None, **how)


@pytest.mark.usefixtures("installed")
def test_what_it_cannot_do_is_refused() -> None:
    x = inputs(5, "scalar")
    log_g = x[4]
    assert log_g is not None
    log_g[0, 2, 1] = -torch.inf
    with pytest.raises(ValueError, match="no decay of exactly 0 for some heads"):
        delta_rule(*x, backend="fla")  # type: ignore[arg-type]
    x = [one if one is None else one.float() for one in inputs(5, "scalar")]
    with pytest.raises(ValueError, match=r"backend: 'fla' cannot run: it has no exact float32"):
        delta_rule(*x, backend="fla")  # type: ignore[arg-type]
    x = inputs(5, "scalar")
    with pytest.raises(ValueError, match="the chunked form alone"):
        delta_rule(*x, backend="fla", form="recurrent")  # type: ignore[arg-type]
    wide = torch.zeros(1, 1, 1, 257, dtype=torch.float64)
    with pytest.raises(ValueError, match="a width of 257"):
        delta_rule(wide, wide, wide, None, backend="fla")


def test_it_must_be_installed_and_is_not_imported() -> None:
    x = [one if one is None else one.bfloat16() for one in inputs(5, "none")]
    reason = fla.why_unavailable(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"backend: 'fla' cannot run: {reason}"):
        delta_rule(*x, backend="fla")  # type: ignore[arg-type]
    assert "fla" not in sys.modules
