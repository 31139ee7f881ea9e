"""The fused attention form against the definition, in Triton's interpreter."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, log_gates
from torch import Tensor

from longhaul.kernels import power_attention
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.testing import assert_close

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before the import of kernels", allow_module_level=True)

from longhaul.kernels.power.triton.attention.backward import attention_backward  # noqa: E402
from longhaul.kernels.power.triton.attention.forward import attention_forward  # noqa: E402


def wide(value: float) -> Any:
    return pytest.param(value, marks=pytest.mark.wide)


ALL_NEEDED = (True, True, True, True)


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 1
    H: int = 2
    G: int = 1
    K: int = 5
    V: int = 3
    degree: int = 2
    normalize: bool = True
    gates: str = "soft"
    offsets: tuple[int, ...] | None = None

    @property
    def call(self) -> PowerCall:
        return PowerCall(
            degree=self.degree,
            scale=self.K**-0.5,
            normalize=self.normalize,
            output_final_state=False,
            form="attention",
            chunk_size=self.T,
        )

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.offsets is None else torch.tensor(self.offsets, dtype=torch.int32)

    def inputs(self) -> list[Tensor | None]:
        """q, k, v and log_g."""
        q = torch.randn(self.B, self.T, self.H, self.K)
        k = torch.randn(self.B, self.T, self.G, self.K)
        if self.normalize and (self.degree == 1 or self.gates == "hard"):
            # For the reason given in power_cases.py.
            q, k = q.abs() + 0.1, k.abs() + 0.1
        log_g = None if self.gates == "none" else log_gates(self.B, self.T, self.G, self.gates)
        return [q, k, torch.randn(self.B, self.T, self.G, self.V), log_g]

    def dout(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.B, self.T, self.H, self.V, generator=generator)

    def reference(self, inputs: list[Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
        """Output and gradients of the definition, document by document."""
        leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
        outs = [
            power_attention(
                *(None if x is None else x[:, start:end] for x in leaves),  # type: ignore[arg-type]
                degree=self.degree,
                normalize=self.normalize,
                backend="reference",
            )[0]
            for start, end in pairwise(self.offsets or (0, self.T))
        ]
        out = torch.cat(outs, dim=1)
        given = [x for x in leaves if x is not None]
        grads = torch.autograd.grad((out * self.dout().to(dtype)).sum(), given)
        names = ["dq", "dk", "dv", "dlog_g"][: len(given)]
        return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def run(
    case: Case, inputs: list[Any], dout: Tensor, needs: tuple[bool, ...] = ALL_NEEDED
) -> dict[str, Tensor | None]:
    """Output and gradients of the kernels."""
    out, inverse, is_live = attention_forward(case.call, *inputs, case.cu_seqlens)
    saved = Saved(*inputs, None, None, case.cu_seqlens, out, None, None, inverse, is_live)
    grads = attention_backward(case.call, saved, dout, needs)
    return {"out": out, **dict(zip(("dq", "dk", "dv", "dlog_g"), grads, strict=True))}


@cache
def expected(case: Case) -> tuple[list[Tensor | None], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs = case.inputs()
    return inputs, case.reference(inputs, torch.float64), case.reference(inputs, torch.float32)


def check(case: Case) -> None:
    inputs, oracle, definition = expected(case)
    actual = run(case, inputs, case.dout())
    multiple = MULTIPLE_PER_DEGREE * max(case.degree, 2)
    for name in oracle:
        found = actual[name]
        assert found is not None
        assert_close(found, oracle[name], definition[name], multiple=multiple, name=name)


CASES = {
    "one token": Case(T=1, normalize=False, gates="none"),
    "T 63, two rows": Case(T=63, B=2),
    "T 100, two groups": Case(T=100, H=4, G=2),
    "T 150, no groups": Case(T=150, G=2),
    "three heads": Case(T=33, H=3, G=3),
    "no gates": Case(T=100, gates="none"),
    "gates of 0 and 1": Case(T=150, gates="hard"),
    "not normalised": Case(T=63, normalize=False),
    "not normalised, gates of 0 and 1": Case(T=63, normalize=False, gates="hard"),
    "neither normalised nor gated": Case(T=63, normalize=False, gates="none"),
    "degree 1": Case(T=63, degree=1),
    "degree 1, gates of 0 and 1": Case(T=100, degree=1, gates="hard"),
    "degree 1, not normalised": Case(T=63, degree=1, normalize=False),
    "degree 1, neither normalised nor gated": Case(T=63, degree=1, normalize=False, gates="none"),
    "degree 4": Case(T=63, degree=4),
    "degree 4, not normalised": Case(T=63, degree=4, normalize=False),
    "degree 6": Case(T=63, H=2, G=1, degree=6, K=3),
    "degree 8": Case(T=63, H=2, G=1, degree=8, K=3),
    "degree 8, gates of 0 and 1": Case(T=63, H=2, G=2, degree=8, K=3, gates="hard"),
    "wide": Case(T=63, H=2, G=1, K=33, V=16),
    "packed": Case(T=150, offsets=(0, 1, 17, 81, 113, 150)),
    "packed, not normalised, gates of 0 and 1": Case(
        T=150, offsets=(0, 64, 150), normalize=False, gates="hard"
    ),
    "packed, degree 1, no gates": Case(T=100, offsets=(0, 70, 100), degree=1, gates="none"),
}


IN_TEST = (
    "one token",
    "gates of 0 and 1",
    "neither normalised nor gated",
    "degree 1, gates of 0 and 1",
    "degree 8, gates of 0 and 1",
    "packed, not normalised, gates of 0 and 1",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in IN_TEST else [pytest.mark.wide])
        for name, case in CASES.items()
    ],
)
def test_equals_the_definition(case: Case) -> None:
    check(case)


def test_the_first_token_reads_its_own_value() -> None:
    case = Case(T=1)
    inputs, oracle, definition = expected(case)
    out, _, _ = attention_forward(case.call, *inputs, None)  # type: ignore[arg-type]
    assert_close(out, oracle["out"], definition["out"], multiple=2.0)


@pytest.mark.wide
def test_strided_inputs() -> None:
    case = Case(T=40, H=4, G=2)
    inputs, _, _ = expected(case)
    dense = run(case, inputs, case.dout())

    def spread(x: Tensor) -> Tensor:
        """A copy with heads before tokens and gaps between the elements of the last dimension."""
        wide = torch.full((x.shape[0], x.shape[2], x.shape[1], 2 * x.shape[3]), torch.nan)
        view = wide.transpose(1, 2)[..., ::2]
        return view.copy_(x)

    q, k, v, log_g = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    assert log_g is not None
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    strided = [spread(q), heads_first, spread(v), log_g.mT.contiguous().mT]
    assert not any(x.is_contiguous() for x in strided)
    actual = run(case, strided, spread(case.dout()))
    for name, wanted in dense.items():
        assert torch.equal(actual[name], wanted), name  # type: ignore[arg-type]
    ones = torch.ones(()).expand(1, 40, 4, 3)
    expanded = run(case, inputs, ones)
    for name, wanted in run(case, inputs, ones.contiguous()).items():
        assert torch.equal(expanded[name], wanted), name  # type: ignore[arg-type]


def test_only_the_requested_gradients_are_computed() -> None:
    case = Case(T=40, H=1)
    inputs, _, _ = expected(case)
    whole = run(case, inputs, case.dout())
    names = ("dq", "dk", "dv", "dlog_g")
    for i, name in enumerate(names):
        needs = tuple(i == j for j in range(4))
        some = run(case, inputs, case.dout(), needs)
        assert [n for n in names if some[n] is not None] == [name]
        assert torch.equal(some[name], whole[name])  # type: ignore[arg-type]
    assert all(run(case, inputs, case.dout(), (False,) * 4)[name] is None for name in names)


@pytest.mark.parametrize("degree", [wide(1), 2, wide(8)])
def test_outputs_ignore_the_future_to_the_bit(degree: int) -> None:
    case = Case(T=100, degree=degree)
    inputs, _, _ = expected(case)
    out, inverse, is_live = attention_forward(case.call, *inputs, None)  # type: ignore[arg-type]
    assert inverse is not None
    assert is_live is not None
    for t in (1, 33, 64, 99):
        changed = [x.clone() for x in inputs if x is not None]
        for x in changed[:3]:
            x[:, t:] = 1e4 * torch.randn_like(x[:, t:])
        changed[3][:, t:] = -20 * torch.rand_like(changed[3][:, t:])
        other, other_inverse, _ = attention_forward(case.call, *changed, None)  # type: ignore[call-arg]
        assert other_inverse is not None
        assert torch.equal(other[:, :t], out[:, :t])
        assert torch.equal(other_inverse[:, :t], inverse[:, :t])
        assert not torch.equal(other[:, t:], out[:, t:])


@pytest.mark.parametrize("degree", [wide(2), 8])
def test_a_gate_of_zero_forgets_everything(degree: int) -> None:
    """At degree 8 weights of keys before the reset would be infinite without the gate."""
    case = Case(T=100, degree=degree)
    inputs = [x.clone() for x in expected(case)[0] if x is not None]
    inputs[3][:, 70] = -torch.inf
    before = run(case, inputs, case.dout())
    for x in inputs[:3]:
        x[:, :70] = 1e6 * torch.randn_like(x[:, :70])
    after = run(case, inputs, case.dout())
    for name in ("out", "dq"):
        assert torch.equal(after[name][:, 70:], before[name][:, 70:])  # type: ignore[index]
    for name, x in after.items():
        assert x is not None
        assert x.isfinite().all(), name


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_large_and_small_scores_of_degree_8(size: float) -> None:
    """Weights up to 1e56, or 1e-48, outside of float32, while outputs are ordinary means."""
    case = Case(T=63, H=2, G=1, degree=8)
    torch.manual_seed(0)
    q, k, v, log_g = case.inputs()
    assert q is not None
    assert k is not None
    inputs = [q * size, k * size, v, log_g]
    oracle, definition = (case.reference(inputs, d) for d in (torch.float64, torch.float32))
    actual = run(case, inputs, case.dout())
    for name, exact in oracle.items():
        found = actual[name]
        assert found is not None
        assert_close(found, exact, definition[name], multiple=120.0, name=name)


def test_unnormalised_sums_overflow_only_if_the_result_does() -> None:
    """Weights of 1e56 on values of 1e-30."""
    case = Case(T=40, H=1, G=1, degree=8, normalize=False, gates="none")
    q, k, v, _ = case.inputs()
    assert q is not None
    assert k is not None
    assert v is not None
    q, k = q.abs() * 1e3, k.abs() * 1e3
    out, _, _ = attention_forward(case.call, q, k, v * 1e-30, None, None)
    exact, _ = power_attention(
        q.double(), k.double(), v.double() * 1e-30, degree=8, normalize=False, backend="reference"
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("degree", [wide(1), 2, 8])
@pytest.mark.parametrize("size", [wide(0.0), 1e-20, wide(1e-42)])
def test_tiny_queries_give_finite_results(degree: int, size: float) -> None:
    """Below the denominator's floor outputs tend to 0 with the query; 1e-42 is denormal.

    Degree 8 has no floor for scores of 1e-20, which are divided by their row's largest.
    """
    case = Case(T=63, degree=degree)
    q, k, v, log_g = expected(case)[0]
    assert q is not None
    tiny = q.clone()
    tiny[:, 40:] *= size
    actual = run(case, [tiny, k, v, log_g], case.dout())
    for name, x in actual.items():
        assert x is not None
        assert x.isfinite().all(), name
    out = actual["out"]
    assert out is not None
    if degree == 8 and size == 1e-20:
        torch.testing.assert_close(out, expected(case)[2]["out"], rtol=1e-4, atol=1e-4)
    elif degree > 1 or size < 1e-30:
        assert out[:, 40:].abs().max() < 1e-6
    _, _, is_live = attention_forward(case.call, tiny, k, v, log_g, None)  # type: ignore[arg-type]
    assert is_live is not None
    assert is_live[:, :40].all()
    assert is_live[:, 40:].any() == (degree in (1, 8) and size == 1e-20)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_floored_denominator_has_no_gradient(degree: int) -> None:
    case = Case(T=40, degree=degree)
    q, k, v, log_g = expected(case)[0]
    assert q is not None
    small = q.clone()
    small[:, 20:] *= 1e-32 ** (1 / degree)
    inputs = [small, k, v, log_g]
    oracle, definition = (case.reference(inputs, d) for d in (torch.float64, torch.float32))
    actual = run(case, inputs, case.dout())
    for name in oracle:
        found = actual[name]
        assert found is not None
        assert_close(found, oracle[name], definition[name], multiple=60.0, name=name)


def test_a_query_orthogonal_to_every_key_reads_zero() -> None:
    case = Case(T=63, K=8)
    q, k, v, log_g = expected(case)[0]
    assert q is not None
    assert k is not None
    q, k = q.clone(), k.clone()
    k[..., 4:] = 0
    q[:, 50:, :, :4] = 0
    actual = run(case, [q, k, v, log_g], case.dout())
    for name, x in actual.items():
        assert x is not None
        assert x.isfinite().all(), name
    assert (actual["out"][:, 50:] == 0).all()  # type: ignore[index]


def test_sums_of_gates_keep_their_precision_beside_resets() -> None:
    """After many resets sums of log gates are large, but their differences must stay exact."""
    case = Case(T=150, H=1, G=1)
    torch.manual_seed(0)
    q, k, v, log_g = case.inputs()
    assert q is not None
    assert k is not None
    assert log_g is not None
    q, k = q.abs() + 0.1, k.abs() + 0.1
    log_g[:, :80] = -torch.inf
    log_g[:, 80:] *= 1e-2
    inputs = [q, k, v, log_g]
    oracle, definition = (case.reference(inputs, d) for d in (torch.float64, torch.float32))
    actual = run(case, inputs, case.dout())
    for name in oracle:
        found = actual[name]
        assert found is not None
        assert_close(found, oracle[name], definition[name], multiple=30.0, name=name)
