"""The custom ops of the delta rule under torch.compile, fake tensors and FLOP counters."""

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels import delta_rule
from longhaul.kernels.delta import library
from longhaul.kernels.delta.call import DeltaCall
from longhaul.kernels.delta.cost import delta_backward_flops, delta_flops

# torch.device(…) as a context lists the functions that it affects at its first use. That must be
# before a fixture replaces torch.empty, or the list is incomplete for all later tests.
with torch.device("cpu"):
    torch.ones(1)

T, H, G, K, V = 20, 4, 2, 8, 3
OFFSETS = [0, 1, 6, 20]


def call(
    *,
    channels: bool = False,
    erases: bool = True,
    is_gated: bool = True,
    is_packed: bool = False,
    is_continued: bool = False,
    reads: bool = True,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Arguments of `longhaul::delta_forward`."""
    B = 1 if is_packed else 2
    S = len(OFFSETS) - 1 if is_packed else B
    log_g = -torch.rand(B, T, H, K) if channels else -torch.rand(B, T, H)
    inputs = (
        torch.nn.functional.normalize(torch.randn(B, T, G, K), dim=-1).to(dtype),
        torch.randn(B, T, H, V, dtype=dtype),
        torch.randn(B, T, G, K, dtype=dtype) if reads else None,
        torch.rand(B, T, H, dtype=dtype) if erases else None,
        log_g if is_gated else None,
        torch.randn(S, H, K, V) if is_continued else None,
    )
    leaves = [x if x is None else x.requires_grad_() for x in inputs]
    defaults = {"scale": 0.3, "chunk_size": 8, "output_final_state": True, "keeps_states": True}
    defaults |= {"backend": "torch"}
    return (*leaves, torch.tensor(OFFSETS) if is_packed else None), defaults | settings


CALLS: dict[str, dict[str, Any]] = {
    "scalar gates": {"output_final_state": False},
    "channel gates": {"channels": True, "is_continued": True},
    "neither gates nor erasing": {"is_gated": False, "erases": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "packed": {"is_packed": True, "is_continued": True},
    "a state alone": {"reads": False},
}
per_call = pytest.mark.parametrize("how", CALLS.values(), ids=CALLS.keys())


def backward_call(how: dict[str, Any]) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Arguments of `longhaul::delta_backward`."""
    inputs, settings = call(**how)
    inputs = tuple(x if x is None else x.detach() for x in inputs)
    out, state, kept = library.delta_forward(*inputs, **settings)
    dout = None if inputs[2] is None else torch.randn_like(out)
    dstate = torch.randn_like(state) if settings["output_final_state"] else None
    needs = [x is not None for x in inputs[:6]]
    return (*inputs, kept, dout, dstate), settings | {"needs": needs}


EVERY_CALL = [
    {"is_gated": gates != "none", "channels": gates == "channel", "erases": erases, "reads": reads}
    | ({"is_packed": True, "is_continued": True} if is_packed else {})
    for gates, erases, is_packed, reads in product(
        ("none", "scalar", "channel"), (True, False), (True, False), (True, False)
    )
]


# opcheck computes a call seven times.
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(CALLS["packed"], id="packed"),
        *(pytest.param(how, id=str(n), marks=pytest.mark.wide) for n, how in enumerate(EVERY_CALL)),
        *(
            pytest.param(CALLS[name], id=name, marks=pytest.mark.wide)
            for name in ("scalar gates", "bfloat16")  # no final state, and another dtype
        ),
    ],
)
def test_ops_pass_opcheck(how: dict[str, Any]) -> None:
    # Of packed documents states beyond those needed are allocated and never written.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs, settings = call(**how)
    torch.library.opcheck(library.delta_forward, inputs, settings, test_utils=tests)
    inputs, settings = backward_call(how)
    torch.library.opcheck(library.delta_backward, inputs, settings, test_utils=tests)


@per_call
def test_fake_tensors_give_the_shapes_of_real_ones(how: dict[str, Any]) -> None:
    inputs, settings = backward_call(how)
    forward = {name: x for name, x in settings.items() if name != "needs"}
    wanted = [
        *library.delta_forward(*inputs[:7], **forward),
        *library.delta_backward(*inputs, **settings),
    ]
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in inputs]
        found = [
            *library.delta_forward(*fakes[:7], **forward),
            *library.delta_backward(*fakes, **settings),
        ]
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [
        (x.shape, x.dtype, x.stride()) for x in wanted
    ]


def test_flops_are_counted() -> None:
    inputs, _ = call()
    k, v, q, beta, log_g, *_ = inputs
    with FlopCounterMode(display=False) as counter:
        out, _ = delta_rule(q, k, v, beta, log_g, chunk_size=8)  # type: ignore[arg-type]
        assert counter.get_total_flops() == 2 * H * delta_flops(T, K, V, 8)
        out.sum().backward()
    both = delta_flops(T, K, V, 8) + delta_backward_flops(T, K, V, 8)
    assert counter.get_total_flops() == 2 * H * both


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the compiler, and remove the run-time checks that only tests add."""
    monkeypatch.setattr(DeltaCall, "__init__", inspect.unwrap(DeltaCall.__init__))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler", "unchecked")
def test_a_compiled_call_is_one_graph() -> None:
    inputs, _ = call(is_packed=True)
    k, v, q, beta, log_g, _, offsets = inputs

    def f(*x: Any) -> Tensor:
        return delta_rule(*x, cu_seqlens=offsets)[0].sin()

    wanted = f(q, k, v, beta, log_g)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(q, k, v, beta, log_g)
    assert torch.equal(found, wanted)
    leaves = [x for x in (q, k, v, beta, log_g) if x is not None]
    for one, other in zip(
        torch.autograd.grad(found.sum(), leaves),
        torch.autograd.grad(wanted.sum(), leaves),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_under_autocast_products_keep_their_precision() -> None:
    k, v, q, beta, log_g, *_ = call()[0]
    wanted, _ = delta_rule(q, k, v, beta, log_g)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = delta_rule(q, k, v, beta, log_g)  # type: ignore[arg-type]
    assert torch.equal(found, wanted)
