"""The custom ops under torch.compile, checkpointing, autograd and FLOP counters."""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels import PowerState, power_attention, state_features
from longhaul.kernels.power import library
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.cost import power_backward_flops, power_flops

# torch.device(…) as a context lists the functions that it affects at its first use. That must be
# before a fixture replaces torch.empty, or the list is incomplete for all later tests.
with torch.device("cpu"):
    torch.ones(1)

T, H, G, K, V = 20, 4, 2, 8, 3
OFFSETS = [0, 1, 6, 20]


def call(
    *,
    is_gated: bool = True,
    is_packed: bool = False,
    is_continued: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Arguments of `longhaul::power_forward`."""
    B = 1 if is_packed else 2
    S, P = len(OFFSETS) - 1 if is_packed else B, state_features(K, 2)
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, G, K), torch.randn(B, T, G, V)
    log_g = logsigmoid(torch.randn(B, T, G)) if is_gated else None
    kv = torch.randn(S, G, P, V, dtype=state_dtype) if is_continued else None
    norm = torch.rand(S, G, P, dtype=state_dtype) if is_continued else None
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    others = [x if x is None else x.requires_grad_() for x in (log_g, kv, norm)]
    offsets = torch.tensor(OFFSETS) if is_packed else None
    defaults = {
        "degree": 2,
        "scale": 0.3,
        "normalize": True,
        "output_final_state": False,
        "form": "chunked",
        "chunk_size": 8,
        "keeps_states": False,
        "backend": "torch",
    }
    return (*leaves, *others, offsets), defaults | settings


CALLS: dict[str, dict[str, Any]] = {
    "attention": {"form": "attention"},
    "no gates": {"is_gated": False},
    "bfloat16": {"dtype": torch.bfloat16, "output_final_state": True},
    "not normalised": {"normalize": False, "output_final_state": True},
    "from state to state": {"is_continued": True, "output_final_state": True},
    "packed": {"is_packed": True},
    "packed, states": {"is_packed": True, "is_continued": True, "output_final_state": True},
    "kept states": {"keeps_states": True, "backend": "triton"},
    # Not packed: the states of empty chunks are never written.
    "kept states, a sum": {"keeps_states": True, "normalize": False, "backend": "triton"},
}


def but_wide(*wide: str) -> pytest.MarkDecorator:
    """Every call, some of them in the wide suite alone: Triton's kernels are interpreted."""
    calls = [
        pytest.param(how, id=name, marks=pytest.mark.wide if name in wide else ())
        for name, how in CALLS.items()
    ]
    return pytest.mark.parametrize("how", calls)


# Of calls that keep states, triton/test_kept_states.py has outputs and gradients in `make test`.
per_call = but_wide("kept states", "kept states, a sum")


def backward_call(
    how: dict[str, Any], needs: list[bool] | None = None
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Arguments of `longhaul::power_backward`."""
    inputs, settings = call(**how)
    inputs = tuple(x if x is None else x.detach() for x in inputs)
    results = library.power_forward(*inputs, **settings)
    gradients = [torch.randn_like(x) for x in results[:3]]
    if not settings["output_final_state"]:
        gradients[1:] = [None, None]
    needs = [x is not None for x in inputs[:6]] if needs is None else needs
    return (*inputs, *results, *gradients), settings | {"needs": needs}


@per_call
def test_forward_passes_opcheck(how: dict[str, Any]) -> None:
    inputs, settings = call(**how)
    torch.library.opcheck(library.power_forward, inputs, settings)


@per_call
def test_backward_passes_opcheck(how: dict[str, Any]) -> None:
    inputs, settings = backward_call(how)
    torch.library.opcheck(library.power_backward, inputs, settings)


@per_call
def test_unrequested_gradients_are_absent(how: dict[str, Any]) -> None:
    inputs, settings = backward_call(how, needs=[False, True, False, False, False, False])
    grads = library.power_backward(*inputs, **settings)
    assert [grad.numel() > 0 for grad in grads] == settings["needs"]
    every, settings = inputs, settings | {"needs": [x is not None for x in inputs[:6]]}
    assert torch.equal(grads[1], library.power_backward(*every, **settings)[1])


@per_call
def test_fake_tensors_give_the_shapes_of_real_ones(how: dict[str, Any]) -> None:
    inputs, settings = backward_call(how)
    forward = {name: x for name, x in settings.items() if name != "needs"}
    wanted = [
        *library.power_forward(*inputs[:7], **forward),
        *library.power_backward(*inputs, **settings),
    ]
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in inputs]
        actual = [
            *library.power_forward(*fakes[:7], **forward),
            *library.power_backward(*fakes, **settings),
        ]
    assert [(x.shape, x.dtype, x.stride()) for x in actual] == [
        (x.shape, x.dtype, x.stride()) for x in wanted
    ]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs Triton's interpreter",
)
def test_gradients_of_tritons_kernels_have_the_dtypes_that_fake_tensors_promise() -> None:
    how = {"is_continued": True, "state_dtype": torch.bfloat16, "backend": "triton"}
    inputs, settings = backward_call(how | {"form": "attention", "chunk_size": T})
    found = [x.dtype for x in library.power_backward(*inputs, **settings)]
    assert found == [x.dtype for x in inputs[:6] if x is not None]


def test_the_op_runs_on_meta() -> None:
    q, k, v = (torch.empty(1, T, H, K, device="meta", requires_grad=True) for _ in range(3))
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    out, state = power_attention(q, k, v, cu_seqlens=offsets, output_final_state=True)
    assert out.shape == (1, T, H, K)
    assert state is not None
    assert state.kv.shape == (3, H, state_features(K, 2), K)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_denominators_have_no_gradient() -> None:
    inputs, settings = call(output_final_state=True)
    results = library.power_forward(*inputs, **settings)
    assert [x.requires_grad for x in results] == [True, True, True, False, False, False, False]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_unused_results_have_no_gradient(which: int) -> None:
    """An absent gradient has the same effect as a zero one."""
    inputs, settings = call(output_final_state=True, is_continued=True)
    leaves = [x for x in inputs if x is not None]
    results = library.power_forward(*inputs, **settings)[:3]
    weights = torch.randn_like(results[which])
    actual = torch.autograd.grad((results[which] * weights).sum(), leaves)
    results = library.power_forward(*inputs, **settings)[:3]
    loss = (results[which] * weights).sum() + sum(0 * x.sum() for x in results)
    torch.testing.assert_close(actual, torch.autograd.grad(loss, leaves))


def test_autocast_is_off_inside_both_ways() -> None:
    inputs, settings = call(is_continued=True)
    leaves = [x for x in inputs if x is not None]
    out = library.power_forward(*inputs, **settings)[0]
    wanted = torch.autograd.grad(out.sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = library.power_forward(*inputs, **settings)[0]
        actual = torch.autograd.grad(other.sum(), leaves)
    assert torch.equal(other, out)
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


def test_projections_under_autocast_need_only_gates_in_float32() -> None:
    project = nn.Linear(6, 2 * 8 + 2 * 8 + 2 * 4 + 2)
    x = torch.randn(1, 20, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v, gates = project(x).split([16, 16, 8, 2], dim=-1)
        heads = [y.unflatten(-1, (2, -1)) for y in (q, k, v)]
        out, _ = power_attention(*heads, logsigmoid(gates.float()))
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert project.weight.grad is not None
    assert project.weight.grad.isfinite().all()


def test_second_derivatives_need_another_form() -> None:
    inputs, _ = call(dtype=torch.float64)
    x = [y for y in inputs if y is not None]

    def second(**how: Any) -> tuple[Tensor, ...]:
        out, _ = power_attention(*x, **how)
        gradients = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), x)

    torch.testing.assert_close(second(form="recurrent"), second(backend="reference"))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        second(form="chunked")


class Mixer(nn.Module):
    """The op between projections, as in an attention layer."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.sizes = [H * K, G * K, G * V, G]
        self.project = nn.Linear(6, sum(self.sizes))

    def forward(
        self, x: Tensor, offsets: Tensor | None = None, state: PowerState | None = None
    ) -> tuple[Tensor, PowerState | None]:
        q, k, v, gate = self.project(x).split(self.sizes, dim=-1)
        return power_attention(
            q.unflatten(2, (H, K)),
            k.unflatten(2, (G, K)),
            v.unflatten(2, (G, V)),
            logsigmoid(gate),
            cu_seqlens=offsets,
            initial_state=state,
            **self.how,
        )


def results_of(
    run: Callable[..., tuple[Tensor, PowerState | None]], mixer: Mixer, *args: Any
) -> list[Tensor]:
    """Output, state, and the gradients of the weights."""
    out, state = run(*args)
    outputs = [out, *(state or ())]
    loss = sum(x.square().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, list(mixer.parameters()))]


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the compiler, and remove the run-time checks that only tests add."""
    monkeypatch.setattr(PowerCall, "__init__", inspect.unwrap(PowerCall.__init__))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED: dict[str, dict[str, Any]] = {
    "auto": {},
    "chunked": {"form": "chunked", "chunk_size": 8, "output_final_state": True},
    "attention": {"form": "attention", "normalize": False},
}


@pytest.mark.usefixtures("fresh_compiler", "unchecked")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("how", COMPILED.values(), ids=COMPILED.keys())
def test_compiled_as_one_graph_it_equals_eager(how: dict[str, Any], is_packed: bool) -> None:
    mixer = Mixer(**how)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    args = [torch.randn(1, T, 6), torch.tensor(OFFSETS) if is_packed else None]
    wanted = results_of(mixer, mixer, *args)
    torch.testing.assert_close(results_of(compiled, mixer, *args), wanted)


@pytest.mark.usefixtures("fresh_compiler", "unchecked")
def test_compiled_for_any_length_it_equals_eager() -> None:
    mixer = Mixer()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (20, 33, 50):
        x = torch.randn(2, length, 6)
        wanted = results_of(mixer, mixer, x)
        torch.testing.assert_close(results_of(compiled, mixer, x), wanted)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


@pytest.mark.usefixtures("fresh_compiler", "unchecked")
def test_widths_may_be_symbols_of_the_compiler() -> None:
    compiled = torch.compile(power_attention, fullgraph=True, dynamic=True, backend="eager")
    for width in (8, 12):
        q, k, v = torch.randn(3, 1, T, 2, width).unbind(0)
        assert torch.equal(compiled(q, k, v)[0], power_attention(q, k, v)[0])


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_compiler", "unchecked")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_to_machine_code_it_equals_eager() -> None:
    mixer = Mixer(form="chunked", chunk_size=8)
    x = torch.randn(2, T, 6)
    wanted = results_of(mixer, mixer, x)
    compiled = torch.compile(mixer, fullgraph=True)
    torch.testing.assert_close(results_of(compiled, mixer, x), wanted)


def test_checkpointing_changes_nothing() -> None:
    mixer = Mixer(form="chunked", chunk_size=8, output_final_state=True)
    x = torch.randn(2, T, 6)

    def run(x: Tensor) -> Any:
        return checkpoint(mixer, x, use_reentrant=False)

    for actual, wanted in zip(results_of(run, mixer, x), results_of(mixer, mixer, x), strict=True):
        assert torch.equal(actual, wanted)


@per_call
def test_flops_are_counted_by_the_formula(how: dict[str, Any]) -> None:
    inputs, settings = call(**how)
    B = inputs[0].shape[0]  # type: ignore[union-attr]
    lengths = [b - a for a, b in pairwise(OFFSETS)] if how.get("is_packed") else [T] * B
    sizes = (K, V, 2, settings["form"], settings["chunk_size"])
    with FlopCounterMode(display=False) as forward:
        out = library.power_forward(*inputs, **settings)[0]
    wanted = sum(power_flops(n, *sizes, queries=H // G) for n in lengths)
    assert forward.get_total_flops() == G * wanted
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    wanted = sum(power_backward_flops(n, *sizes, queries=H // G) for n in lengths)
    assert backward.get_total_flops() == G * wanted


def test_flops_of_offsets_without_values_assume_equal_documents() -> None:
    inputs, settings = call(is_packed=True)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        fakes = [x if x is None else mode.from_tensor(x) for x in inputs]
        library.power_forward(*fakes, **settings)
    one = power_flops(T // 3, K, V, 2, "chunked", 8, queries=H // G)
    assert counter.get_total_flops() == 3 * G * one
