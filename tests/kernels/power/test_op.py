"""Every form and backend against the definition in float64: outputs, states, every gradient."""

from typing import Any

import pytest
import torch
from power_cases import Case, has_backward
from torch import Tensor

from longhaul.kernels import PowerState, power_attention, power_attention_step
from longhaul.kernels.power.cost import choose_form

FORMS: dict[str, dict[str, Any]] = {
    "attention": {"form": "attention"},
    "chunked-16": {"form": "chunked", "chunk_size": 16},
    "chunked-50": {"form": "chunked", "chunk_size": 50},
    "chunked-auto": {"form": "chunked"},
    "recurrent": {"form": "recurrent"},
}
# The interpreter takes seconds per case, so Triton has its own cases, in float32 only.
TRITON: dict[str, dict[str, Any]] = {
    f"triton {name}": how | {"backend": "triton"}
    for name, how in FORMS.items()
    if name != "chunked-auto"
}

CASES = {
    "one token": Case(T=1),
    "T 63": Case(T=63, H=4, G=2),
    "T 100": Case(T=100),
    "T 257, no groups": Case(T=257, H=4, G=4),
    "three heads": Case(T=63, H=3, G=3),
    "no gates": Case(T=100, gates="none"),
    "gates of 0 and 1": Case(T=257, gates="hard"),
    "gates of 0 and 1, no state": Case(T=100, gates="hard", state="none"),
    "no gates, no state": Case(T=63, gates="none", state="none"),
    "not normalised": Case(T=100, normalize=False),
    "not normalised, gates of 0 and 1": Case(T=100, normalize=False, gates="hard"),
    "degree 1": Case(T=100, degree=1),
    "degree 1, gates of 0 and 1": Case(T=100, degree=1, gates="hard"),
    "degree 1, not normalised": Case(T=100, degree=1, normalize=False, K=16, V=8),
    "degree 4": Case(T=63, degree=4),
    "degree 4, several tiles": Case(T=63, degree=4, K=9),
    "degree 6": Case(T=40, H=2, G=2, degree=6, K=3, V=2),
    "degree 8": Case(T=40, H=2, G=2, degree=8, K=3, V=2),
    "several tiles": Case(T=63, K=20, V=17),
    "arbitrary state": Case(T=63, K=20, state="arbitrary"),
    "arbitrary state, degree 1": Case(T=63, degree=1, state="arbitrary"),
    "arbitrary state, degree 4": Case(T=40, degree=4, K=9, state="arbitrary"),
}
ATTENTION, CHUNKED_16, CHUNKED_50, RECURRENT = TRITON
# The attention form with a state is the chunked form with a single chunk.
TRITON_CASES = [
    ("one token", Case(T=1), (ATTENTION, CHUNKED_16, RECURRENT)),
    (
        "one token, neither gates nor state",
        Case(T=1, normalize=False, gates="none", state="none"),
        (ATTENTION,),
    ),
    ("T 63, two groups", Case(T=63, H=4, G=2), (ATTENTION,)),
    ("T 40, two groups", Case(T=40, B=1, H=4, G=2), (CHUNKED_16,)),
    ("T 63, three heads", Case(T=63, B=1, H=3, G=3), (CHUNKED_50,)),
    ("T 100", Case(T=100), (CHUNKED_50,)),
    ("no gates", Case(T=63, B=1, gates="none"), (CHUNKED_16,)),
    ("no gates, no state", Case(T=63, B=1, gates="none", state="none"), (ATTENTION, CHUNKED_50)),
    ("no state", Case(T=63, B=1, state="none"), (ATTENTION, CHUNKED_16)),
    ("gates of 0 and 1", Case(T=63, B=1, gates="hard"), (ATTENTION, CHUNKED_16, CHUNKED_50)),
    ("gates of 0 and 1, no state", Case(T=63, B=1, gates="hard", state="none"), (ATTENTION,)),
    ("not normalised", Case(T=63, B=1, normalize=False), (CHUNKED_16, CHUNKED_50)),
    (
        "not normalised, gates of 0 and 1",
        Case(T=63, B=1, H=4, G=4, normalize=False, gates="hard"),
        (CHUNKED_50,),
    ),
    (
        "not normalised, no state",
        Case(T=63, B=1, normalize=False, gates="hard", state="none"),
        (ATTENTION, CHUNKED_16),
    ),
    ("degree 1", Case(T=63, B=1, degree=1), (CHUNKED_16,)),
    ("degree 1, gates of 0 and 1", Case(T=63, B=1, degree=1, gates="hard"), (CHUNKED_50,)),
    (
        "degree 1, not normalised",
        Case(T=63, B=1, degree=1, normalize=False, K=16, V=8, state="none"),
        (ATTENTION, CHUNKED_16),
    ),
    # More than one block of features and of values.
    ("degree 1, wide", Case(T=40, B=1, H=1, G=1, degree=1, K=140, V=130), (CHUNKED_16,)),
    ("wide values", Case(T=20, B=1, V=130), (ATTENTION, CHUNKED_16)),
    ("degree 4", Case(T=20, B=1, degree=4), (CHUNKED_16,)),
    ("degree 4, several tiles", Case(T=33, B=1, degree=4, K=9), (CHUNKED_16,)),
    ("degree 4, one tile", Case(T=20, B=1, degree=4, K=2), (CHUNKED_16, RECURRENT)),
    ("degree 4, no state", Case(T=40, B=1, degree=4, state="none"), (ATTENTION,)),
    ("degree 6", Case(T=40, H=2, G=2, degree=6, K=3, V=2, state="none"), (ATTENTION,)),
    ("degree 8", Case(T=40, H=2, G=2, degree=8, K=3, V=2, state="none"), (ATTENTION,)),
    ("K 8, whole tiles", Case(T=63, B=1, K=8, V=16), (CHUNKED_16,)),
    ("K 16", Case(T=100, B=1, K=16), (CHUNKED_50,)),
    ("several tiles", Case(T=63, B=1, K=20, V=17), (ATTENTION, CHUNKED_16)),
    ("arbitrary state", Case(T=40, B=1, K=20, state="arbitrary"), (CHUNKED_16,)),
    (
        "arbitrary state, gates of 0 and 1, not normalised",
        Case(T=63, B=1, K=9, gates="hard", normalize=False, state="arbitrary"),
        (ATTENTION, CHUNKED_50),
    ),
    ("arbitrary state, degree 1", Case(T=63, B=1, degree=1, state="arbitrary"), (CHUNKED_16,)),
    ("arbitrary state, degree 4", Case(T=20, B=1, degree=4, K=9, state="arbitrary"), (CHUNKED_16,)),
    ("some tokens", Case(T=10, K=20, V=17), (RECURRENT,)),
    ("some tokens, degree 1", Case(T=10, degree=1, gates="hard", state="none"), (RECURRENT,)),
    ("some tokens, degree 4", Case(T=10, H=2, G=2, degree=4, normalize=False), (RECURRENT,)),
    ("some tokens, arbitrary state", Case(T=10, B=1, K=9, state="arbitrary"), (RECURRENT,)),
]

# What `make test` shows of Triton: every kernel, with and without states, gates and the norm, at
# degrees 1 and 2; test_edges.py has degree 4. `make test-all` has the rest: groups, and several
# blocks of features and of values.
IN_TEST = (
    *("one token", "no gates, no state", "gates of 0 and 1", "not normalised, no state"),
    *("degree 1, gates of 0 and 1", "arbitrary state, gates of 0 and 1, not normalised"),
)

SLOW = (
    *("degree 4, several tiles", "some tokens, degree 4", "arbitrary state, degree 4"),
    *("not normalised", "not normalised, gates of 0 and 1", "several tiles"),
)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float32_equals_the_definition(case: Case, how: dict[str, Any]) -> None:
    case.check(torch.float32, **how)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        pytest.param(
            case,
            TRITON[form],
            id=f"{name}-{form}",
            # The interpreter takes many seconds for the slow ones.
            marks=pytest.mark.soak if name in SLOW else [] if name in IN_TEST else pytest.mark.wide,
        )
        for name, case, forms in TRITON_CASES
        for form in forms
    ],
)
def test_triton_equals_the_definition(case: Case, how: dict[str, Any]) -> None:
    case.check(torch.float32, **how)


@pytest.mark.parametrize(
    ("K", "at_once"),
    [
        pytest.param(20, 1, id="one tile"),
        pytest.param(16, 2, marks=pytest.mark.wide, id="two of three tiles"),
        pytest.param(20, 2, marks=pytest.mark.wide, id="two of six tiles"),
    ],
)
def test_gradients_of_a_tile_at_a_time(
    monkeypatch: pytest.MonkeyPatch, K: int, at_once: int
) -> None:
    """As on most chips; bfloat16 takes two at a time. With three tiles the table is padded."""
    from longhaul.kernels.power.triton import features
    from longhaul.kernels.power.triton.chunked import (
        backward,
        forward,
        key_gradient,
        query_gradient,
    )

    def tiles_of(*args: Any) -> Any:
        return features.tiles_of.__wrapped__(*args)

    for module in (query_gradient, key_gradient):
        monkeypatch.setattr(module, "in_pairs", lambda *_: False)
    monkeypatch.setattr(features, "_tiles_at_once", lambda *_: at_once)
    monkeypatch.setattr(forward, "tiles_of", tiles_of)
    monkeypatch.setattr(backward, "tiles_of", tiles_of)
    rows = 4 if at_once == 2 else 3
    assert tiles_of(16, 2, torch.device("cpu"), torch.float32).table.shape == (rows, 3)
    case = Case(T=40, B=1, K=K, state="arbitrary")
    case.check(torch.float32, **TRITON[CHUNKED_16])


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
def test_float64_stays_float64(how: dict[str, Any]) -> None:
    Case(T=63).check(torch.float64, **how)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_accumulate_in_float32(how: dict[str, Any], dtype: torch.dtype) -> None:
    Case(T=257).check(dtype, **how)


def test_auto_is_right_where_it_chooses_chunks() -> None:
    assert choose_form(1200, 8, 8, 2) == "chunked"
    Case(T=1200, K=8, V=8, state="none").check(torch.float32)


def test_attention_form_with_several_blocks_of_queries() -> None:
    Case(T=300, K=8, V=8, gates="hard").check(torch.float32, form="attention")


@pytest.mark.wide
def test_gradcheck() -> None:
    case = Case(T=6, B=1, K=2, V=2)
    inputs = [x.double().requires_grad_() for x in case.inputs(torch.float64).values()]

    def run(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, kv: Tensor, norm: Tensor) -> Any:
        out, state = power_attention(
            q, k, v, log_g, initial_state=PowerState(kv, norm), output_final_state=True,
            form="chunked", chunk_size=4,
        )  # fmt: skip
        assert state is not None
        return out, state.kv, state.norm

    assert torch.autograd.gradcheck(run, inputs)


def but_wide(hows: dict[str, dict[str, Any]], shown: str | None = None) -> list[Any]:
    """Parameters of which `make test` has those in torch, and at most one of those in Triton."""
    return [
        pytest.param(
            how, id=name, marks=[pytest.mark.wide] if name in TRITON and name != shown else []
        )
        for name, how in hows.items()
    ]


DIFFERENTIABLE = FORMS | {name: how for name, how in TRITON.items() if has_backward(how)}


@pytest.mark.parametrize("how", but_wide(DIFFERENTIABLE))
@pytest.mark.parametrize("has_state", [pytest.param(False, marks=pytest.mark.wide), True])
def test_only_the_requested_gradients_are_computed(how: dict[str, Any], has_state: bool) -> None:
    """Each gradient is the same whether it is computed alone or with all others."""
    state = "of some past" if has_state else "none"
    inputs = Case(T=20, B=1, state=state).inputs(torch.float32)
    every = gradients(inputs, list(inputs), how)
    for name, wanted in every.items():
        found = gradients(inputs, [name], how)
        assert list(found) == [name]
        assert torch.equal(found[name], wanted), name


def gradients(
    inputs: dict[str, Tensor], wanted: list[str], how: dict[str, Any]
) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in inputs.items()}
    state = PowerState(leaves["kv"], leaves["norm"]) if "kv" in leaves else None
    tokens = (leaves[name] for name in ("q", "k", "v", "log_g"))
    out, _ = power_attention(*tokens, initial_state=state, **how)
    out.square().sum().backward()
    return {name: x.grad for name, x in leaves.items() if x.grad is not None}


@pytest.mark.parametrize("how", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
def test_state_alone_has_gradients(how: dict[str, Any]) -> None:
    k, v = (torch.randn(1, 20, 2, 4, requires_grad=True) for _ in range(2))
    _, state = power_attention(k, k, v, output_final_state=True, **how)
    assert state is not None
    state.kv.sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum() > 0


EVERY_FORM = FORMS | TRITON


@pytest.mark.parametrize("how", but_wide(EVERY_FORM, CHUNKED_16))
def test_strided_inputs(how: dict[str, Any]) -> None:
    case = Case(T=20 if has_backward(how) else 5, B=1, H=2, G=2, K=8, V=8)
    dense = case.inputs(torch.float32)
    # q: tokens innermost; k: every second element; v: heads before tokens; kv: transposed.
    strided = {
        "q": dense["q"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "k": dense["k"].repeat_interleave(2, dim=3)[..., ::2],
        "v": dense["v"].transpose(1, 2).contiguous().transpose(1, 2),
        "log_g": dense["log_g"].mT.contiguous().mT,
        "kv": dense["kv"].mT.contiguous().mT,
        "norm": dense["norm"].repeat_interleave(3, dim=2)[..., ::3],
    }
    assert not any(x.is_contiguous() for x in strided.values())
    wanted = case.run(dense, torch.float32, **how)
    for name, x in case.run(strided, torch.float32, **how).items():
        # torch may sum matrix products in another order if strides differ.
        torch.testing.assert_close(x, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("how", but_wide(EVERY_FORM, CHUNKED_50))
def test_inputs_and_state_are_not_modified(how: dict[str, Any]) -> None:
    case = Case(T=63 if "backend" not in how else 20 if has_backward(how) else 4, B=1)
    inputs = case.inputs(torch.float32)
    before = {name: x.clone() for name, x in inputs.items()}
    case.run(inputs, torch.float32, **how)
    state = PowerState(inputs["kv"], inputs["norm"])
    token = {name: inputs[name][:, :1] for name in ("q", "k", "v", "log_g")}
    power_attention_step(state, **token, backend=how.get("backend", "auto"))
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), name
