"""`power_state` against the definition in float64: values and every gradient."""

from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, log_gates
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels import PowerState, power_attention, power_state, state_features
from longhaul.kernels.power import library
from longhaul.kernels.power.cost import power_state_flops
from longhaul.kernels.power.torch.attention import InsideChunks
from longhaul.kernels.testing import assert_close

with torch.device("cpu"):  # as in test_library.py
    torch.ones(1)


@dataclass(frozen=True)
class Case:
    T: int = 63
    B: int = 2
    G: int = 2
    K: int = 5
    V: int = 3
    degree: int = 2
    gates: str = "soft"
    has_state: bool = True
    offsets: tuple[int, ...] | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.offsets is None else torch.tensor(self.offsets, dtype=torch.int32)

    def inputs(self) -> dict[str, Tensor]:
        B = 1 if self.offsets is not None else self.B
        S = len(self.offsets) - 1 if self.offsets is not None else B
        P = state_features(self.K, self.degree)
        tensors = {"k": torch.randn(B, self.T, self.G, self.K)}
        tensors["v"] = torch.randn(B, self.T, self.G, self.V)
        if self.gates != "none":
            tensors["log_g"] = log_gates(B, self.T, self.G, self.gates)
        if self.has_state:
            tensors |= {"kv": torch.randn(S, self.G, P, self.V), "norm": torch.randn(S, self.G, P)}
        return tensors

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """The state, and the gradients of a random linear function of it."""
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        initial = PowerState(leaves["kv"], leaves["norm"]) if self.has_state else None
        state = power_state(
            leaves["k"],
            leaves["v"],
            leaves.get("log_g"),
            degree=self.degree,
            initial_state=initial,
            cu_seqlens=self.cu_seqlens,
            **how,
        )
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
            for x in state
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results = state._asdict() | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def check_float32(self, **how: Any) -> None:
        inputs = self.inputs()
        oracle = self.run(inputs, torch.float64, backend="reference")
        definition = self.run(inputs, torch.float32, backend="reference")
        found = self.run(inputs, torch.float32, **how)
        multiple = MULTIPLE_PER_DEGREE * max(self.degree, 2)
        for name, wanted in oracle.items():
            assert found[name].dtype == torch.float32
            assert_close(found[name], wanted, definition[name], multiple=multiple, name=name)


PACKED = (0, 1, 20, 63)
CASES = {
    "one token": Case(T=1),
    "ragged": Case(),
    "one row": Case(T=100, B=1, G=1),
    "no gates": Case(gates="none"),
    "gates of 0 and 1": Case(T=100, gates="hard"),
    "no state": Case(has_state=False),
    "gates of 0 and 1, no state": Case(gates="hard", has_state=False),
    "packed": Case(offsets=PACKED),
    "packed, gates of 0 and 1": Case(offsets=PACKED, gates="hard"),
    "packed, neither gates nor state": Case(offsets=PACKED, gates="none", has_state=False),
    "degree 1": Case(degree=1),
    "degree 1, packed, gates of 0 and 1": Case(degree=1, gates="hard", offsets=PACKED),
    "degree 4": Case(degree=4, K=9),
    "degree 4, packed, gates of 0 and 1": Case(degree=4, gates="hard", offsets=PACKED),
    "several tiles": Case(K=20, V=17),
}
per_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize("chunk_size", [16, 50, None])
@per_case
def test_float32_equals_the_definition(case: Case, chunk_size: int | None) -> None:
    case.check_float32(backend="torch", chunk_size=chunk_size)


@per_case
def test_float64_equals_the_definition(case: Case) -> None:
    inputs = case.inputs()
    found, wanted = (
        case.run(inputs, torch.float64, backend=backend, chunk_size=16)
        for backend in ("torch", "reference")
    )
    # Sums over resets, which are clamped to 2^-192, lose some digits.
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "case",
    [
        Case(T=40, B=1),
        Case(T=40, B=1, G=1, gates="none", has_state=False),
        Case(T=63, G=1, gates="hard", offsets=PACKED),
        Case(T=40, B=1, G=1, degree=1, K=16, V=8, gates="hard"),
        pytest.param(Case(T=20, B=1, G=1, degree=4, K=9), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_triton_equals_the_definition(case: Case) -> None:
    case.check_float32(backend="triton", chunk_size=16)


@per_case
def test_it_equals_the_final_state_of_attention(case: Case) -> None:
    inputs = {name: x.double() for name, x in case.inputs().items()}
    initial = PowerState(inputs.pop("kv"), inputs.pop("norm")) if case.has_state else None
    settings = {
        "degree": case.degree,
        "cu_seqlens": case.cu_seqlens,
        "initial_state": initial,
        "chunk_size": 16,
    }
    _, wanted = power_attention(
        inputs["k"], **inputs, form="chunked", output_final_state=True, **settings
    )
    assert wanted is not None
    torch.testing.assert_close(tuple(power_state(**inputs, **settings)), tuple(wanted))


def test_sixteen_bits_accumulate_in_float32() -> None:
    inputs = {name: x.bfloat16() for name, x in Case(T=257, has_state=False).inputs().items()}
    inputs["log_g"] = inputs["log_g"].float()
    wanted = power_state(**{name: x.double() for name, x in inputs.items()})
    state = power_state(**inputs)
    assert state.kv.dtype == state.norm.dtype == torch.float32
    for found, exact in zip(state, wanted, strict=True):
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("used", ["kv", "norm"])
def test_an_unused_result_has_no_gradient(used: str) -> None:
    inputs = Case(gates="hard").inputs()

    def gradients(backend: str) -> tuple[Tensor, ...]:
        leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
        initial = PowerState(leaves["kv"], leaves["norm"])
        tokens = leaves["k"], leaves["v"], leaves["log_g"]
        state = power_state(*tokens, initial_state=initial, chunk_size=16, backend=backend)
        loss = getattr(state, used).square().sum()
        return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)

    torch.testing.assert_close(gradients("torch"), gradients("reference"))


def test_no_attention_inside_chunks_is_computed() -> None:
    k, v = (torch.randn(1, 40, 2, 4, requires_grad=True) for _ in range(2))
    with patch.object(InsideChunks, "__init__", side_effect=AssertionError):
        state = power_state(k, v, chunk_size=16)
        state.kv.sum().backward()
    assert k.grad is not None


def test_flops_are_linear_in_the_length() -> None:
    k, v = torch.randn(2, 1, 4096, 1, 4).unbind(0)
    with FlopCounterMode(display=False) as counter:
        power_state(k, v)
    assert counter.get_total_flops() == power_state_flops(4096, 4, 4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(2, 5, 4)}, r"k: found shape \(2, 5, 4\), wanted \(B, T, heads, width\)"),
        ({"v": torch.ones(2, 5, 1, 4)}, r"v: found shape \(2, 5, 1, 4\), wanted \(2, 5, 2, V\)"),
        ({"v": torch.ones(2, 5, 2, 4).double()}, "v: found torch.float64, wanted one .* k and v"),
        ({"log_g": torch.ones(2, 5)}, r"log_g: found shape \(2, 5\), wanted \(2, 5, 2\)"),
        ({"degree": 3}, "degree: found 3"),
        ({"chunk_size": 0}, "chunk_size: found 0"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: found B = 2, wanted 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    k, v = torch.ones(2, 2, 5, 2, 4).unbind(0)
    with pytest.raises(ValueError, match=message):
        power_state(**{"k": k, "v": v} | change)


OPS = [Case(T=20), Case(T=20, gates="none"), Case(T=20, has_state=False, offsets=(0, 1, 20))]


def op_inputs(case: Case) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    inputs = case.inputs()
    leaves = [inputs.get(name) for name in ("k", "v", "log_g", "kv", "norm")]
    leaves = [x if x is None else x.requires_grad_() for x in leaves]
    return (*leaves, case.cu_seqlens), {"degree": 2, "chunk_size": 8, "backend": "torch"}


def backward_inputs(case: Case) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    inputs, settings = op_inputs(case)
    inputs = tuple(x if x is None else x.detach() for x in inputs)
    state = library.power_state(*inputs, **settings)
    needs = [x is not None for x in inputs[:5]]
    return (*inputs, *state, *(torch.randn_like(x) for x in state)), settings | {"needs": needs}


@pytest.mark.parametrize("case", OPS, ids=str)
def test_forward_and_backward_pass_opcheck(case: Case) -> None:
    torch.library.opcheck(library.power_state, *op_inputs(case))
    torch.library.opcheck(library.power_state_backward, *backward_inputs(case))


@pytest.mark.parametrize("case", OPS, ids=str)
def test_fake_tensors_give_the_shapes_of_real_ones(case: Case) -> None:
    inputs, settings = backward_inputs(case)
    forward = {name: x for name, x in settings.items() if name != "needs"}

    def run(tensors: list[Any]) -> list[tuple[Any, ...]]:
        results = [
            *library.power_state(*tensors[:6], **forward),
            *library.power_state_backward(*tensors, **settings),
        ]
        return [(x.shape, x.dtype, x.stride()) for x in results]

    with FakeTensorMode() as mode:
        fakes = run([x if x is None else mode.from_tensor(x) for x in inputs])
    assert fakes == run(list(inputs))


@pytest.mark.parametrize("case", OPS, ids=str)
def test_flops_are_counted_by_the_formula(case: Case) -> None:
    inputs, settings = op_inputs(case)
    lengths = [b - a for a, b in pairwise(case.offsets or ())] or [case.T] * case.B
    wanted = case.G * sum(power_state_flops(T, case.K, case.V, 2) for T in lengths)
    with FlopCounterMode(display=False) as forward:
        kv, _ = library.power_state(*inputs, **settings)
    assert forward.get_total_flops() == wanted
    with FlopCounterMode(display=False) as backward:
        kv.sum().backward()
    assert backward.get_total_flops() == 2 * wanted


def test_it_runs_on_meta() -> None:
    k, v = (torch.empty(1, 20, 2, 4, device="meta", requires_grad=True) for _ in range(2))
    state = power_state(k, v, cu_seqlens=torch.empty(4, dtype=torch.int32, device="meta"))
    assert state.kv.shape == (3, 2, state_features(4, 2), 4)
    state.kv.sum().backward()
    assert k.grad is not None


def test_a_saved_state_is_loaded_without_running_code(tmp_path: Path) -> None:
    state = PowerState(torch.randn(1, 2, 64, 4), torch.randn(1, 2, 64))
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(loaded, PowerState)
    assert all(map(torch.equal, loaded, state))


@pytest.mark.parametrize("K", [1, 5, 8])
def test_a_state_of_degree_4_saved_in_tiles_of_4_is_read(K: int) -> None:
    k, v = (torch.randn(1, 9, 1, width, dtype=torch.float64) for width in (K, 3))
    state = power_state(k, v, degree=4)
    padded = torch.nn.functional.pad(k, (0, -K % 4)).unflatten(-1, (-1, 4))  # (1, 9, 1, tiles, 4)
    features = torch.cat(
        [
            torch.einsum("td,tc,tb,ta->tdcba", *(padded[0, :, 0, tile] for tile in tiles[::-1]))
            for tiles in combinations_with_replacement(range(padded.shape[3]), 4)
        ],
        dim=1,
    ).flatten(1)  # (9, P)
    old = PowerState((features.T @ v[0, :, 0])[None, None], features.sum(dim=0)[None, None])
    for found, wanted in zip(old.from_tiles_of_4(K), state, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match=rf"tiles of 4, which from_tiles_of_4\({K}\) reads"):
        power_attention(k, k, v, degree=4, initial_state=old)
    with pytest.raises(ValueError, match=f"kv: found {state.kv.shape[2]} rows, wanted"):
        state.from_tiles_of_4(K)
