"""Every form and backend against the definition in float64: outputs, states, every gradient."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.power.cost import choose_form
from longhaul.kernels.testing import assert_close

FORMS: dict[str, dict[str, Any]] = {
    "attention": {"form": "attention"},
    "chunked-16": {"form": "chunked", "chunk_size": 16},
    "chunked-50": {"form": "chunked", "chunk_size": 50},
    "chunked-auto": {"form": "chunked"},
    "recurrent": {"form": "recurrent"},
}
# Features sum terms of both signs where the definition raises a sum to a power, the more so the
# higher the power, and the gradients of the gates are differences of long sums.
MULTIPLE_PER_DEGREE = 15.0


@dataclass(frozen=True)
class Case:
    T: int
    H: int = 4
    G: int = 2
    K: int = 5
    V: int = 3
    degree: int = 2
    normalize: bool = True
    gates: str = "soft"
    is_continued: bool = True

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Leaves of the graph, drawn in float64 and rounded to a dtype that q, k and v have."""
        B, P = 2, state_features(self.K, self.degree)
        tensors = {
            "q": torch.randn(B, self.T, self.H, self.K),
            "k": torch.randn(B, self.T, self.G, self.K),
            "v": torch.randn(B, self.T, self.G, self.V),
        }
        if self.normalize and (self.degree == 1 or self.gates == "hard"):
            # Positive features give a denominator worth dividing by at degree 1. After a reset
            # a row has one key, and its gradient is a difference of equal terms over (q·k)².
            tensors["q"], tensors["k"] = tensors["q"].abs() + 0.1, tensors["k"].abs() + 0.1
        tensors = {name: x.to(dtype) for name, x in tensors.items()}
        if self.gates != "none":
            log_g = logsigmoid(torch.randn(B, self.T, self.G) + 2)
            if self.gates == "hard":
                log_g[torch.rand(log_g.shape) < 0.1] = -torch.inf
                log_g[torch.rand(log_g.shape) < 0.3] = 0
            tensors["log_g"] = log_g
        if self.is_continued:
            past = torch.randn(B, 7, self.G, self.K).abs()
            _, state = power_attention(
                past,
                past,
                torch.randn(B, 7, self.G, self.V),
                degree=self.degree,
                output_final_state=True,
                backend="reference",
            )
            assert state is not None
            assert state.kv.shape == (B, self.G, P, self.V)
            tensors["kv"], tensors["norm"] = state
        return tensors

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """Outputs, and gradients of a random linear functional of all of them."""
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        if dtype != torch.float64:
            for name in ("log_g", "kv", "norm"):
                if name in inputs:
                    leaves[name] = inputs[name].float().requires_grad_()
        state = PowerState(leaves["kv"], leaves["norm"]) if self.is_continued else None
        out, after = power_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            leaves.get("log_g"),
            degree=self.degree,
            normalize=self.normalize,
            initial_state=state,
            output_final_state=self.is_continued,
            **how,
        )
        assert out.dtype == dtype
        results = {"out": out}
        if after is not None:
            results |= {"final kv": after.kv, "final norm": after.norm}
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
            for x in results.values()
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def check(self, dtype: torch.dtype, **how: Any) -> None:
        inputs, oracle, definition = expected(self, dtype)
        actual = self.run(inputs, dtype, **how)
        multiple = MULTIPLE_PER_DEGREE * max(self.degree, 2)
        for name in oracle:
            assert_close(actual[name], oracle[name], definition[name], multiple=multiple, name=name)


@cache
def expected(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """Inputs, the definition's results in float64, and in the dtype asked for."""
    torch.manual_seed(0)
    inputs = case.inputs(dtype)
    oracle = case.run(inputs, torch.float64, backend="reference")
    rounded = torch.float32 if dtype == torch.float64 else dtype
    return inputs, oracle, case.run(inputs, rounded, backend="reference")


CASES = {
    "one token": Case(T=1),
    "T 63": Case(T=63),
    "T 100, one group": Case(T=100, G=1),
    "T 257, no groups": Case(T=257, G=4),
    "three heads": Case(T=63, H=3, G=3),
    "no gates": Case(T=100, gates="none"),
    "gates of 0 and 1": Case(T=257, gates="hard"),
    "gates of 0 and 1, no state": Case(T=100, gates="hard", is_continued=False),
    "no gates, no state": Case(T=63, gates="none", is_continued=False),
    "not normalised": Case(T=100, normalize=False),
    "not normalised, gates of 0 and 1": Case(T=100, normalize=False, gates="hard"),
    "degree 1": Case(T=100, degree=1),
    "degree 1, gates of 0 and 1": Case(T=100, degree=1, gates="hard"),
    "degree 1, not normalised": Case(T=100, degree=1, normalize=False, K=16, V=8),
    "degree 4": Case(T=63, degree=4),
    "degree 4, two tiles and more": Case(T=63, H=2, G=1, degree=4, K=9),
    "degree 6": Case(T=40, H=2, G=2, degree=6, K=3, V=2),
    "degree 8": Case(T=40, H=2, G=2, degree=8, K=3, V=2),
    "several tiles": Case(T=63, K=20, V=17),
}


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float32_equals_the_definition(case: Case, how: dict[str, Any]) -> None:
    case.check(torch.float32, **how)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
def test_float64_stays_float64(how: dict[str, Any]) -> None:
    Case(T=63).check(torch.float64, **how)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_accumulate_in_float32(how: dict[str, Any], dtype: torch.dtype) -> None:
    Case(T=257).check(dtype, **how)


def test_auto_is_right_where_it_takes_chunks() -> None:
    assert choose_form(1200, 8, 8, 2) == "chunked"
    Case(T=1200, H=2, G=1, K=8, V=8, is_continued=False).check(torch.float32)


def test_attention_form_with_several_blocks_of_queries() -> None:
    Case(T=300, K=8, V=8, gates="hard").check(torch.float32, form="attention")


def test_gradcheck() -> None:
    case = Case(T=9, H=2, G=1, K=3, V=2)
    inputs = [x.double().requires_grad_() for x in case.inputs(torch.float64).values()]

    def run(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, kv: Tensor, norm: Tensor) -> Any:
        out, state = power_attention(
            q, k, v, log_g, initial_state=PowerState(kv, norm), output_final_state=True,
            form="chunked", chunk_size=4,
        )  # fmt: skip
        assert state is not None
        return out, state.kv, state.norm

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
def test_only_the_gradients_asked_for(how: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 20, 2, 4) for _ in range(3))
    v.requires_grad_()
    out, _ = power_attention(q, k, v, **how)
    out.sum().backward()
    assert v.grad is not None
    assert q.grad is None


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
def test_state_alone_has_gradients(how: dict[str, Any]) -> None:
    k, v = (torch.randn(1, 20, 2, 4, requires_grad=True) for _ in range(2))
    _, state = power_attention(k, k, v, output_final_state=True, **how)
    assert state is not None
    state.kv.sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum() > 0


@pytest.mark.parametrize("degree", [1, 2, 4, 6, 8])
def test_steps_equal_the_definition(degree: int) -> None:
    case = Case(T=20, K=3, degree=degree, normalize=degree > 1, is_continued=False, gates="hard")
    inputs = {name: x.double() for name, x in case.inputs(torch.float64).items()}
    settings: dict[str, Any] = {"degree": degree, "normalize": case.normalize}
    wanted, final = power_attention(
        **inputs, backend="reference", output_final_state=True, **settings
    )
    P = state_features(case.K, degree)
    state = PowerState(
        torch.zeros(2, 2, P, 3, dtype=torch.float64), torch.zeros(2, 2, P, dtype=torch.float64)
    )
    for t in range(case.T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        out, state = power_attention_step(state, **token, **settings)
        torch.testing.assert_close(out, wanted[:, t : t + 1], rtol=1e-8, atol=1e-8)
    assert final is not None
    torch.testing.assert_close(state.kv, final.kv, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(state.norm, final.norm, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32])
def test_steps_in_place_overwrite_the_state(degree: int, state_dtype: torch.dtype) -> None:
    case = Case(T=5, degree=degree)
    inputs = {name: x.double() for name, x in case.inputs(torch.float64).items()}
    kept = PowerState(inputs.pop("kv").to(state_dtype), inputs.pop("norm").to(state_dtype))
    state = PowerState(*(x.clone() for x in kept))
    memory = [x.data_ptr() for x in state]
    for t in range(case.T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        wanted, kept = power_attention_step(kept, **token, degree=degree)
        kept = PowerState(*(x.to(state_dtype) for x in kept))
        out, state = power_attention_step(state, **token, degree=degree, inplace=True)
        torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(tuple(state), tuple(kept))
    assert [x.data_ptr() for x in state] == memory


def test_a_step_of_the_reference_is_a_step() -> None:
    case = Case(T=1)
    inputs = {name: x.double() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm"))
    wanted, after = power_attention_step(state, **inputs)
    out, other = power_attention_step(state, **inputs, backend="reference", inplace=True)
    torch.testing.assert_close(out, wanted)
    assert other.kv is state.kv
    torch.testing.assert_close(tuple(state), tuple(after))


def test_strided_inputs() -> None:
    B, T, H, K = 2, 63, 2, 8
    q, k, v = torch.randn(3, B, H, K, T).mT.transpose(2, 3).unbind(0)
    q, k, v = (x.permute(0, 3, 1, 2) if x.shape[1] != T else x for x in (q, k, v))
    assert q.shape == (B, T, H, K)
    assert not q.is_contiguous()
    log_g = logsigmoid(torch.randn(B, H, T)).transpose(1, 2)
    dense = [x.contiguous() for x in (q, k, v, log_g)]
    for how in FORMS.values():
        out, _ = power_attention(q, k, v, log_g, **how)
        wanted, _ = power_attention(*dense, **how)
        assert torch.equal(out, wanted)


def test_inputs_and_state_are_left_alone() -> None:
    case = Case(T=63)
    inputs = case.inputs(torch.float32)
    before = {name: x.clone() for name, x in inputs.items()}
    for how in FORMS.values():
        case.run(inputs, torch.float32, **how)
    state = PowerState(inputs["kv"], inputs["norm"])
    token = {name: inputs[name][:, :1] for name in ("q", "k", "v", "log_g")}
    power_attention_step(state, **token)
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), name
