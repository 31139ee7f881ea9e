"""Edge cases of the op: splits, packing, causality, resets, small denominators, memory."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.backend import Backend
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.cost import Form
from longhaul.kernels.power.torch import backend as torch_backend
from longhaul.kernels.testing import assert_close

FORMS: dict[str, dict[str, Any]] = {
    "attention": {"form": "attention"},
    "chunked": {"form": "chunked", "chunk_size": 16},
    "recurrent": {"form": "recurrent"},
    "reference": {"backend": "reference"},
}
TRITON: dict[str, dict[str, Any]] = {
    "triton attention": {"form": "attention", "backend": "triton"},
    "triton chunked": {"form": "chunked", "chunk_size": 16, "backend": "triton"},
}
TRITON_STEPS: dict[str, Any] = {"form": "recurrent", "backend": "triton"}
EVERY_FORM = FORMS | TRITON


def wide(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


def but_wide(*wide: str) -> pytest.MarkDecorator:
    """Every form, some of them in the wide suite alone."""
    forms = [
        pytest.param(how, id=name, marks=pytest.mark.wide if name in wide else ())
        for name, how in EVERY_FORM.items()
    ]
    return pytest.mark.parametrize("how", forms)


# The interpreter takes seconds per case. `make test` has Triton's chunked form, which shares the
# gates and the numerics of the attention form; test_attention.py has the latter on its own.
per_form = but_wide("triton attention")
# Where the chunked form takes five to ten seconds.
per_form_in_torch = but_wide(*TRITON)


MULTIPLE = 2 * MULTIPLE_PER_DEGREE  # at degree 2


def is_triton(how: dict[str, Any]) -> bool:
    return how.get("backend") == "triton"


def dtype_of(*hows: dict[str, Any]) -> torch.dtype:
    """Triton has no float64."""
    return torch.float32 if any(map(is_triton, hows)) else torch.float64


def leaves_of(x: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [y.detach().to(dtype).requires_grad_() for y in x]


SPLITS = [
    *((first, second) for first in FORMS for second in FORMS),
    wide("triton attention", "triton chunked"),
    wide("triton chunked", "attention"),
    ("chunked", "triton chunked"),
    # The interpreter takes many seconds for a step.
    *(
        pytest.param(*pair, marks=pytest.mark.soak)
        for pair in (
            ("triton chunked", "triton steps"),
            ("reference", "triton steps"),
            ("triton steps", "recurrent"),
        )
    ),
    wide("triton steps", "triton attention"),
]


@pytest.mark.parametrize(("first", "second"), SPLITS)
def test_a_split_changes_nothing(first: str, second: str) -> None:
    """In every form, split within a chunk, between chunks, and near the ends."""
    hows = EVERY_FORM | {"triton steps": TRITON_STEPS}
    dtype = dtype_of(hows[first], hows[second])
    is_slow = dtype == torch.float32
    x = inputs(35, K=9, V=17) if is_slow else inputs(70, B=2)
    settings: dict[str, Any] = {"output_final_state": True, "backend": "reference"}
    wanted, rounded = (
        flat(power_attention(*(y.to(part) for y in x), **settings))
        for part in (torch.float64, torch.float32)
    )
    x = [y.to(dtype) for y in x]
    for split in (1, 22) if is_slow else (1, 16, 37, 69):
        head, state = power_attention(
            *(y[:, :split] for y in x), output_final_state=True, **hows[first]
        )
        tail, after = power_attention(
            *(y[:, split:] for y in x), initial_state=state, output_final_state=True, **hows[second]
        )
        found = flat((torch.cat([head, tail], dim=1), after))
        for actual, exact, definition in zip(found, wanted, rounded, strict=True):
            assert_close(actual, exact, definition, multiple=MULTIPLE)


def flat(results: tuple[Tensor, PowerState | None]) -> list[Tensor]:
    out, state = results
    assert state is not None
    return [out, *state]


@per_form_in_torch
def test_a_split_changes_no_gradient(how: dict[str, Any]) -> None:
    x = inputs(50)
    weights = torch.randn(1, 50, 4, 4).double()

    def whole(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = leaves_of(x, dtype)
        out, _ = power_attention(*leaves, backend="reference")
        return torch.autograd.grad((out * weights).sum(), leaves)

    leaves = leaves_of(x, dtype_of(how))
    head, state = power_attention(*(y[:, :23] for y in leaves), output_final_state=True, **how)
    tail, _ = power_attention(*(y[:, 23:] for y in leaves), initial_state=state, **how)
    actual = torch.autograd.grad((torch.cat([head, tail], 1) * weights).sum(), leaves)
    for found, exact, definition in zip(
        actual, whole(torch.float64), whole(torch.float32), strict=True
    ):
        assert_close(found, exact, definition, multiple=MULTIPLE)


@per_form
@pytest.mark.parametrize("has_state", [wide(False), True])
def test_packed_documents_equal_separate_ones(how: dict[str, Any], has_state: bool) -> None:
    """Outputs, final states and gradients, those of the initial states included."""
    offsets = [0, 1, 17, 50, 83]
    N, P = len(offsets) - 1, state_features(8, 2)
    x = inputs(83, H=2, G=1)
    if has_state:
        past = torch.randn(N, 5, 1, 8).double()
        _, state = power_attention(
            past, past, torch.randn(N, 5, 1, 4).double(), output_final_state=True
        )
        assert state is not None
        assert state.kv.shape == (N, 1, P, 4)
        x += state
    weights = [torch.randn(1, 83, 2, 4).double(), torch.randn(N, 1, P, 4), torch.randn(N, 1, P)]

    def results(
        x: list[Tensor], weights: list[Tensor], offsets: Tensor | None, **how: Any
    ) -> list[Tensor]:
        out, after = power_attention(
            *x[:4],
            cu_seqlens=offsets,
            initial_state=PowerState(*x[4:]) if has_state else None,
            output_final_state=has_state,
            **how,
        )
        found = [out, *(after or ())]
        loss = sum((y * weight).sum() for y, weight in zip(found, weights, strict=False))
        return [*found, *torch.autograd.grad(loss, x)]

    def separate(dtype: torch.dtype) -> list[Tensor]:
        documents = []
        for n, (start, end) in enumerate(pairwise(offsets)):
            tokens = [y[:, start:end] for y in x[:4]] + [y[n : n + 1] for y in x[4:]]
            own = [weights[0][:, start:end], *(y[n : n + 1] for y in weights[1:])]
            documents.append(results(leaves_of(tokens, dtype), own, None, backend="reference"))
        # Results of tokens are concatenated along T, those of states along N.
        return [
            torch.cat(parts, dim=1 if parts[1].shape[1] == 16 else 0)
            for parts in zip(*documents, strict=True)
        ]

    actual = results(leaves_of(x, dtype_of(how)), weights, torch.tensor(offsets), **how)
    for found, exact, definition in zip(
        actual, separate(torch.float64), separate(torch.float32), strict=True
    ):
        assert_close(found, exact, definition, multiple=MULTIPLE)


@pytest.mark.parametrize("degree", [1, 2, wide(4), wide(6)])
@pytest.mark.parametrize("has_gates", [True, False])
@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS)
def test_a_gate_of_zero_begins_a_document(
    how: dict[str, Any], has_gates: bool, degree: int
) -> None:
    """Outputs and gradients are those of packed documents."""
    offsets = torch.tensor([0, 1, 16, 33, 34, 65, 96, 100])
    x = [y[:1] for y in inputs(100, H=2, G=1)]
    x[:2] = [y.abs() for y in x[:2]]
    x[3] = x[3] if has_gates else torch.zeros_like(x[3])
    leaves = leaves_of(x, torch.float64)
    q, k, v, log_g = leaves
    is_first = torch.zeros(1, 100, 1).bool().index_fill(1, offsets[:-1], True)
    reset = log_g.masked_fill(is_first, -torch.inf)
    found, _ = power_attention(q, k, v, reset, degree=degree, **how)
    packed, _ = power_attention(q, k, v, log_g, degree=degree, cu_seqlens=offsets, **how)
    probe = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, leaves, probe) for y in (found, packed)]
    for one, other in zip((found, *gradients[0]), (packed, *gradients[1]), strict=True):
        assert (one - other).abs().max() <= 1e-13 * max(1, other.abs().max())


@per_form_in_torch
def test_outputs_ignore_the_future_to_the_bit(how: dict[str, Any]) -> None:
    if is_triton(how):
        places, x = (1, 37, 69), inputs(70, K=9, H=2, G=1)
    else:
        places, x = (1, 100, 137, 299), inputs(300, K=16)
    x = [y.float() for y in x]
    out, _ = power_attention(*x, **how)
    for t in places:
        changed = [y.clone() for y in x]
        for y in changed[:3]:
            y[:, t:] = 100 * torch.randn_like(y[:, t:])
        changed[3][:, t:] = -20 * torch.rand_like(changed[3][:, t:])
        other, _ = power_attention(*changed, **how)
        assert torch.equal(other[:, :t], out[:, :t])
        assert not torch.equal(other[:, t:], out[:, t:])


@per_form
def test_a_gate_of_zero_forgets_everything(how: dict[str, Any]) -> None:
    x = [y.float() for y in inputs(60)]
    x[3][:, 33] = -torch.inf
    out, _ = power_attention(*x, **how)
    other = [y.clone() for y in x]
    for y in other[:3]:
        y[:, :33] = 1e3 * torch.randn_like(y[:, :33])
    after, _ = power_attention(*other, **how)
    assert torch.equal(after[:, 33:], out[:, 33:])


@per_form_in_torch
def test_gradients_of_gates_stop_at_a_reset(how: dict[str, Any]) -> None:
    """Not even rounding errors of large gradients pass, as the sums of eq. (15) stop at a reset."""
    q, k, v, log_g = inputs(60)
    log_g[:, 33] = -torch.inf
    v[:, 33:] *= 1e6
    log_g.requires_grad_()
    weights = torch.rand(1, 60, 4, 4)
    out, _ = power_attention(q, k, v, log_g, backend="reference", normalize=False)
    (wanted,) = torch.autograd.grad((out * weights).sum(), log_g)
    x = [y.detach().float() for y in (q, k, v, log_g)]
    x[3].requires_grad_()
    out, _ = power_attention(*x, normalize=False, **how)
    (actual,) = torch.autograd.grad((out * weights).sum(), x[3])
    size = wanted[:, :33].abs().max().item()
    assert (actual - wanted)[:, :33].abs().max() < 1e-5 * size


def check_against_the_definition(x: list[Tensor], how: dict[str, Any], degree: int) -> None:
    """Outputs and gradients in float32."""

    def results(dtype: torch.dtype, **how: Any) -> tuple[Tensor, ...]:
        leaves = leaves_of(x, dtype)
        out, _ = power_attention(*leaves, degree=degree, **how)
        return out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)

    weights = torch.randn(*x[0].shape[:3], x[2].shape[3], dtype=torch.float64)
    for found, exact, definition in zip(
        results(torch.float32, **how),
        results(torch.float64, backend="reference"),
        results(torch.float32, backend="reference"),
        strict=True,
    ):
        assert_close(found, exact, definition, multiple=MULTIPLE / 2 * degree)


@per_form
def test_queries_and_keys_of_a_thousand_at_degree_4(how: dict[str, Any]) -> None:
    """Weights of 1e25, with a reset in the middle."""
    q, k, v, log_g = inputs(33, K=5, H=2, G=1)
    log_g[:, 20] = -torch.inf
    # Positive, so that the first weight after the reset is as large as the others.
    check_against_the_definition([1e3 * q.abs(), 1e3 * k.abs(), v, log_g], how, degree=4)


@per_form
def test_a_floored_denominator_has_no_gradient(how: dict[str, Any]) -> None:
    q, k, v, log_g = inputs(33, H=2, G=1)
    q[:, 20:] *= 1e-16
    check_against_the_definition([q, k, v, log_g], how, degree=2)


@pytest.mark.wide
@per_form
def test_gates_of_one_over_a_long_time(how: dict[str, Any]) -> None:
    q, k, v, log_g = inputs(400, K=4, V=3, H=1, G=1)
    check_against_the_definition([q, k, v, 0 * log_g], how, degree=2)


@per_form
@pytest.mark.parametrize("gate", [-torch.inf, wide(-1e30), wide(-100.0), wide(0.0)])
def test_gates_of_any_size_give_finite_gradients(how: dict[str, Any], gate: float) -> None:
    x = [y.float() for y in inputs(40)]
    x[3][:, 5:20] = gate
    x[3][:, 0] = gate
    leaves = [y.requires_grad_() for y in x]
    out, state = power_attention(*leaves, output_final_state=True, **how)
    assert state is not None
    (out.sum() + state.kv.sum()).backward()
    for y in [out, *state, *(leaf.grad for leaf in leaves)]:
        assert y is not None
        assert y.isfinite().all()
    if gate == -torch.inf:
        assert leaves[3].grad is not None
        assert (leaves[3].grad[:, 5:20] == 0).all()


@per_form_in_torch
@pytest.mark.parametrize("scale", [1.0, wide(1e-12)])
def test_a_query_orthogonal_to_every_key_stays_small(how: dict[str, Any], scale: float) -> None:
    """The denominator is 0, and the part read from the state is only rounding error."""
    T = 60 if is_triton(how) else 200
    q, k, v, log_g = (y.float() for y in inputs(T, K=16))
    k[..., 8:] = 0
    q[:, -50:, :, :8] = 0
    # A rotation keeps them orthogonal but makes products of coordinates differ from 0.
    rotation = torch.linalg.qr(torch.randn(16, 16))[0]
    leaves = [y.requires_grad_() for y in (q @ rotation * scale, k @ rotation, v, log_g)]
    out, _ = power_attention(*leaves, **how)
    out.sum().backward()
    assert out.abs().max() < 10 * v.abs().max()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_of_an_orthogonal_query_stays_small(backend: Backend) -> None:
    """The same for the step, whose floor is its own."""
    q, k, v, log_g = (y.float() for y in inputs(60, K=16, B=4))
    k[..., 8:] = 0
    q[..., :8] = 0
    rotation = torch.linalg.qr(torch.randn(16, 16))[0]
    q, k = q @ rotation, k @ rotation
    _, state = power_attention(q, k, v, log_g, output_final_state=True)
    assert state is not None
    token = (y[:, -1:] for y in (q, k, v, log_g))
    out, _ = power_attention_step(state, *token, backend=backend)
    assert out.abs().max() < 10 * v.abs().max()


@per_form
def test_a_query_of_zero_reads_zero(how: dict[str, Any]) -> None:
    q, k, v, _ = (y.float().requires_grad_() for y in inputs(40))
    out, _ = power_attention(q * 0, k, v, **how)
    out.sum().backward()
    assert (out == 0).all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@per_form_in_torch
def test_autocast_keeps_float32_inside(how: dict[str, Any]) -> None:
    x = [y.float() for y in inputs(60)]
    wanted, _ = power_attention(*x, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = power_attention(*x, **how)
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_weights_that_a_state_cannot_tell_from_rounding_read_towards_zero(form: Form) -> None:
    """docs/kernels.md says below which cosine: here two tokens, the first of them in the state."""
    k = torch.zeros(1, 2, 1, 8)
    k[..., 0] = 1
    v = torch.ones(1, 2, 1, 1)
    for cosine, is_read in ((0.3, True), (0.1, False)):
        q = torch.zeros(1, 2, 1, 8)
        q[..., 0], q[..., 1] = cosine, (1 - cosine**2) ** 0.5
        call = partial(power_attention, degree=8, scale=1.0, chunk_size=1, backend="torch")
        out = call(q, k, v, form=form)[0][0, 1].item()
        assert out == pytest.approx(1.0, rel=1e-5) if is_read else 0 <= out < 0.1
        assert call(q, k, v, form="attention")[0][0, 1].item() == pytest.approx(1.0)


def test_memory_stays_linear() -> None:
    """No tensor of size T × P or T × T exists, forward or backward."""
    T = 4096
    q, k, v, log_g = (y.float() for y in inputs(T, K=16, V=16, H=1, G=1))
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for y in tree_leaves(result):
                largest = max(largest, y.numel() if isinstance(y, Tensor) else 0)
            return result

    settings: dict[str, Any] = {"degree": 2, "scale": 0.25, "normalize": True, "chunk_size": 64}
    call = PowerCall(output_final_state=False, form="chunked", **settings)
    with Watch():
        after = torch_backend.forward(call, q, k, v, log_g, None, None, None)
        saved = Saved(
            q, k, v, log_g, None, None, None, after.out, None, None, after.inverse, after.is_live
        )
        torch_backend.backward(call, saved, after.out, None, None, (True,) * 4 + (False,) * 2)
    assert T * 16 <= largest < T * state_features(16, 2) / 4


@pytest.mark.parametrize("degree", [4, 6, 8])
def test_attention_form_computes_no_state_unless_asked(degree: int) -> None:
    # At degree 8 a state of these widths would have 10^10 features per head.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    inputs = (q, k, v)
    found, state = power_attention(*inputs, degree=degree, form="attention", backend="torch")
    # Not computed by the reference backend, which would build the state.
    weights = (torch.einsum("bthk,bihk->bhti", q, k) / 8).pow(degree).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = torch.einsum("bhti,bihv->bthv", weights, v)
    assert state is None
    torch.testing.assert_close(found, wanted)
    probe = torch.randn_like(found)
    gradients = zip(
        torch.autograd.grad(found, inputs, probe),
        torch.autograd.grad(wanted, inputs, probe),
        strict=True,
    )
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
