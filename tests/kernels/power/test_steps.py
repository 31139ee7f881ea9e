"""Decoding steps against the definition in float64: outputs, states, states in place."""

from importlib import import_module
from typing import Any

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, Case

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.backend import Backend
from longhaul.kernels.power.state import round_kv
from longhaul.kernels.testing import assert_close

# (backend, dtype, degree, V): every degree of each backend; V = 17 needs two blocks of the kernel.
STEPS = [
    ("torch", torch.float64, 1, 3),
    ("torch", torch.float64, 2, 3),
    ("torch", torch.float64, 4, 3),
    ("torch", torch.float64, 6, 3),
    ("torch", torch.float64, 8, 3),
    pytest.param("triton", torch.float32, 1, 17, marks=pytest.mark.wide),
    ("triton", torch.float32, 2, 17),
    pytest.param("triton", torch.float32, 4, 17, marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("backend", "dtype", "degree", "V"), STEPS)
def test_steps_equal_the_definition(
    backend: Backend, dtype: torch.dtype, degree: int, V: int
) -> None:
    case = Case(
        T=12, H=4, G=2, K=3, V=V, degree=degree, normalize=degree > 1, state="none", gates="hard"
    )  # fmt: skip
    inputs = {name: x.to(dtype) for name, x in case.inputs(torch.float64).items()}
    settings: dict[str, Any] = {"degree": degree, "normalize": case.normalize}
    (wanted, final), (rounded, rounded_final) = (
        power_attention(
            **{name: x.to(precision) for name, x in inputs.items()},
            backend="reference",
            output_final_state=True,
            **settings,
        )
        for precision in (torch.float64, torch.float32)
    )
    assert final is not None
    assert rounded_final is not None
    P = state_features(case.K, degree)
    state = PowerState(torch.zeros(2, 2, P, V, dtype=dtype), torch.zeros(2, 2, P, dtype=dtype))
    multiple = MULTIPLE_PER_DEGREE * max(degree, 2)
    for t in range(case.T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        before = PowerState(*(x.clone() for x in state))
        out, after = power_attention_step(state, **token, **settings, backend=backend)
        assert torch.equal(state.kv, before.kv)
        assert torch.equal(state.norm, before.norm)
        state = after
        at = (slice(None), slice(t, t + 1))
        assert_close(out, wanted[at], rounded[at], multiple=multiple)
    assert_close(state.kv, final.kv, rounded_final.kv, multiple=multiple)
    assert_close(state.norm, final.norm, rounded_final.norm, multiple=multiple)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    ("backend", "dtype", "state_dtype"),
    [
        ("torch", torch.float64, torch.float64),
        ("torch", torch.float64, torch.float32),
        ("triton", torch.float32, torch.float32),
        pytest.param("triton", torch.float32, torch.float64, marks=pytest.mark.wide),
    ],
)
def test_steps_in_place_overwrite_the_state(
    backend: Backend, dtype: torch.dtype, degree: int, state_dtype: torch.dtype
) -> None:
    case = Case(T=5, V=17, degree=degree)
    inputs = {name: x.to(dtype) for name, x in case.inputs(torch.float64).items()}
    kept = PowerState(inputs.pop("kv").to(state_dtype), inputs.pop("norm").to(state_dtype))
    state = PowerState(*(x.clone() for x in kept))
    memory = [x.data_ptr() for x in state]
    settings: dict[str, Any] = {"degree": degree, "backend": backend}
    for t in range(case.T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        wanted, kept = power_attention_step(kept, **token, **settings)
        kept = PowerState(*(x.to(state_dtype) for x in kept))
        out, state = power_attention_step(state, **token, **settings, inplace=True)
        torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(tuple(state), tuple(kept))
    assert [x.data_ptr() for x in state] == memory


@pytest.mark.parametrize(
    "programs",
    [pytest.param(1, marks=pytest.mark.wide), 4, pytest.param(64, marks=pytest.mark.wide)],
)
def test_features_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Fifteen blocks of features in one part, in parts of eight and seven, and in 15 parts."""
    step = import_module("longhaul.kernels.power.triton.step")
    case = Case(T=1, B=1, H=2, K=33, V=17)
    inputs = {name: x.float() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm"))
    assert step.tiles_of(33, 2, torch.device("cpu"), torch.float32).num_blocks == 15
    wanted, after = power_attention_step(state, **inputs, backend="torch")
    monkeypatch.setattr(step, "_PROGRAMS", programs)
    out, found = power_attention_step(state, **inputs, backend="triton")
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(tuple(found), tuple(after))
    out, _ = power_attention_step(state, **inputs, inplace=True, backend="triton")
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(tuple(state), tuple(after))


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_a_bfloat16_state_is_rounded_to_a_neighbour(backend: Backend) -> None:
    case = Case(T=1, V=17)
    inputs = {name: x.float() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm")).to_bfloat16()
    assert (state.kv.dtype, state.norm.dtype) == (torch.bfloat16, torch.float32)
    exact = PowerState(state.kv.float(), state.norm)
    wanted, after = power_attention_step(exact, **inputs, backend=backend)
    out, rounded = power_attention_step(state, **inputs, backend=backend)
    torch.testing.assert_close(out, wanted)
    assert rounded.kv.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.norm, after.norm)
    error = (rounded.kv.float() - after.kv).abs()
    assert (error <= after.kv.abs() * 2**-7).all()
    assert (error > after.kv.abs() * 2**-8).any()  # not to nearest
    memory = state.kv.data_ptr()
    _, overwritten = power_attention_step(state, **inputs, backend=backend, inplace=True)
    assert overwritten.kv.data_ptr() == memory
    assert torch.equal(overwritten.kv, rounded.kv)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_equal_sums_are_rounded_alike(backend: Backend) -> None:
    """All products are small integers, so that the sums of both backends are equal."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-9, 9, (1, 1, 2, n), generator=generator) for n in (5, 5, 17))
    kv = torch.randint(256, 512, (1, 2, state_features(5, 2), 17), generator=generator)
    norm = torch.randint(256, 512, kv.shape[:3], generator=generator).float()
    state = PowerState(kv.bfloat16(), norm)
    _, after = power_attention_step(state, q.float(), k.float(), v.float(), backend=backend)
    _, exact = power_attention_step(
        PowerState(state.kv.double(), norm.double()), q.double(), k.double(), v.double(),
        backend="torch",
    )  # fmt: skip
    assert torch.equal(after.kv, round_kv(exact.kv.float(), exact.norm.float()))


def test_rounding_at_random_is_right_on_average() -> None:
    x = torch.tensor([1.0, 1.001, -3.3333, 1e-38, 1e-41, 0.0]).expand(1, 1, 100_000, 6)
    rounded = round_kv(x, torch.rand(1, 1, 100_000)).double()
    step = 2.0 ** (torch.frexp(x[0, 0, 0]).exponent - 8).clamp(min=-133)
    fraction = (rounded.mean(dim=2) - x[0, 0, 0]) / step
    assert (fraction.abs() < 4 * 0.5 / 100_000**0.5).all()
    assert torch.equal(rounded[..., 0], torch.ones(1, 1, 100_000).double())
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan]).expand(1, 1, 50, 3)
    kept = round_kv(extremes, torch.rand(1, 1, 50))
    torch.testing.assert_close(kept.float(), extremes, equal_nan=True)


def test_a_bfloat16_state_has_no_gradient() -> None:
    case = Case(T=1)
    inputs = {name: x.float() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm")).to_bfloat16()
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"state\.kv: found bfloat16 and tensors that need a grad"):
        power_attention_step(state, **inputs)
    short = PowerState(state.kv, state.norm.bfloat16())
    with pytest.raises(ValueError, match=r"state\.norm: found torch\.bfloat16, wanted float32"):
        power_attention_step(short, **{name: x.detach() for name, x in inputs.items()})


def test_a_step_of_the_reference_equals_a_step_in_torch() -> None:
    case = Case(T=1)
    inputs = {name: x.double() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm"))
    wanted, after = power_attention_step(state, **inputs)
    out, other = power_attention_step(state, **inputs, backend="reference", inplace=True)
    torch.testing.assert_close(out, wanted)
    assert other.kv is state.kv
    torch.testing.assert_close(tuple(state), tuple(after))
