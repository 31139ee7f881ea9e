"""Kinds whose recurrence flash-linear-attention computes, with plain torch in its place."""

from typing import Any

import fla_in_torch
import pytest
import torch
from torch import Tensor

from longhaul.modules.attention import Attention, LayerShape, attention_config
from longhaul.modules.attention.recurrent import delta
from longhaul.modules.documents import Documents

KERNELS = {
    # Where documents begin, and so everything decays, DeltaNet has gates too.
    "deltanet": "gated_delta_rule",
    "gated_deltanet": "gated_delta_rule",
    "kimi_delta": "kda",
    "gated_linear": "gla",
}


def build(kind: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    shape = LayerShape(width=12, heads=2, key_heads=2, head_dim=8)
    return attention_config(kind)(**options).build(shape).double()


def results(attention: Attention, is_first: Tensor | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    documents = None if is_first is None else Documents(x, is_first=is_first)
    y, _ = attention(x, documents=documents)
    grads = torch.autograd.grad(y.sin().sum(), [x, *attention.parameters()], allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("kind", KERNELS)
def test_documents_and_gradients_are_those_of_our_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = torch.zeros(2, 9, dtype=torch.bool)
    is_first[0, [0, 4]] = is_first[1, 7] = True
    wanted = results(build(kind), is_first)
    called = fla_in_torch.install(monkeypatch)
    monkeypatch.setattr(delta, "runs_on_fla", lambda *_: True)
    found = results(build(kind, backend="fla"), is_first)
    assert called == [KERNELS[kind]]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_on_a_cpu_the_kernels_are_ours() -> None:
    ours, theirs = (results(build("kimi_delta", backend=x), None) for x in ("auto", "fla"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_power_delta_is_refused() -> None:
    with pytest.raises(ValueError, match="backend: found 'fla', wanted 'auto'"):
        attention_config("power_delta")(backend="fla")
