"""Decoding steps against the definition in float64: outputs, states, states in place."""

from typing import Any

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, Case

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.backend import Backend
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
        ("triton", torch.float32, torch.float64),
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


def test_a_step_of_the_reference_equals_a_step_in_torch() -> None:
    case = Case(T=1)
    inputs = {name: x.double() for name, x in case.inputs(torch.float64).items()}
    state = PowerState(inputs.pop("kv"), inputs.pop("norm"))
    wanted, after = power_attention_step(state, **inputs)
    out, other = power_attention_step(state, **inputs, backend="reference", inplace=True)
    torch.testing.assert_close(out, wanted)
    assert other.kv is state.kv
    torch.testing.assert_close(tuple(state), tuple(after))
