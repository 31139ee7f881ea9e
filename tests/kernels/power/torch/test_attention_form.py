"""The attention form as one C++ call each way, against its formula in float64."""

import pytest
import torch
from torch import Tensor

from longhaul.kernels import power_attention
from longhaul.kernels.power.call import Forward, PowerCall, Saved
from longhaul.kernels.power.torch import attention_form, compiled
from longhaul.kernels.power.torch.chunked.backward import Gradients
from longhaul.kernels.power.torch.gated_sums import add_gated_sums
from longhaul.kernels.shapes import DENOMINATOR_FLOOR

pytestmark = pytest.mark.skipif(
    not compiled.attends(2, torch.empty(0)), reason="there is no C++ compiler"
)

SCALE = 0.5


def formula(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, degree: int, normalize: bool
) -> Tensor:
    """(B, T, H, V) of q (B, T, H, K), k and v (B, T, G, …) and log_g (B, T, G)."""
    R = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(R, dim=2) for x in (k, v))
    weights = (SCALE * torch.einsum("bthk,bshk->bhts", q, k)) ** degree
    if log_g is not None:
        sums = log_g.cumsum(1).repeat_interleave(R, dim=2).transpose(1, 2)
        weights = weights * (sums[..., :, None] - sums[..., None, :]).clamp(max=0).exp()
    weights = weights.tril()
    if normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total.abs() < DENOMINATOR_FLOOR, DENOMINATOR_FLOOR, total)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def between(shape: tuple[int, ...], *, strided: bool = False) -> Tensor:
    """Random tokens (B, T, …) of a tensor whose other tokens are NaN."""
    B, T, *rest = shape
    whole = torch.full((B, T + 40, *rest), torch.nan)
    if strided:
        whole = whole.mT.contiguous().mT
    whole[:, :T] = torch.randn(shape)
    return whole[:, :T]


def is_alone(x: Tensor) -> bool:
    """Whether a tensor made by `between` has finite numbers, and NaN still follows them."""
    B, T = x.shape[:2]
    after = x.as_strided((B, 40, *x.shape[2:]), x.stride(), x.storage_offset() + T * x.stride(1))
    return bool(x.isfinite().all() and after.isnan().all())


# B, T, H, G, K, V: one token; blocks that lack tokens; more than a span and a vector
SIZES = [(1, 1, 1, 1, 1, 1), (2, 257, 4, 2, 5, 3), (1, 70, 2, 2, 40, 33)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("degree", [1, 2])
def test_outputs_and_gradients(
    degree: int, sizes: tuple[int, int, int, int, int, int], has_gates: bool, normalize: bool
) -> None:
    torch.manual_seed(0)
    B, T, H, G, K, V = sizes
    q = between((B, T, H, K))
    k, v = between((B, T, G, K), strided=True), between((B, T, G, V))
    if degree == 1 and normalize:
        # A row's weights have one sign, or its denominator could almost cancel: half are negative.
        k.abs_()
        q.abs_().mul_(torch.randn(B, T, H, 1).sign())
    if T > 1:
        k[:, 0] = 0  # the first denominator is below its floor
    log_g = -torch.rand(B, T, G) / 10 if has_gates else None
    call = PowerCall(
        degree=degree,
        scale=SCALE,
        normalize=normalize,
        output_final_state=False,
        form="attention",
        chunk_size=T,
    )
    assert attention_form.serves(call, q, k, v)
    out, inverse = between((B, T, H, V)), between((B, T, H)) if normalize else None
    is_live = torch.zeros(B, T, H, dtype=torch.bool) if normalize else None
    attention_form.forward(call, q, k, v, log_g, Forward(out, None, None, inverse, is_live))
    dout = torch.randn(B, T, 1, 1).expand(out.shape)
    dq, dk, dv = (between(x.shape) for x in (q, k, v))
    dlog_g = None if log_g is None else between(log_g.shape)
    saved = Saved(q, k, v, log_g, None, None, None, out, None, None, inverse, is_live)
    attention_form.backward(call, saved, dout, Gradients(dq, dk, dv, dlog_g, None, None))
    assert is_live is None or is_live.sum() == B * H * max(T - 1, 1)
    assert inverse is None or is_alone(inverse)

    wide = [x.double().requires_grad_() for x in (q, k, v, log_g) if x is not None]
    wanted = formula(*wide[:3], wide[3] if has_gates else None, degree, normalize)
    gradients = torch.autograd.grad(wanted, wide, dout.double())
    # Gradients of means are differences of larger terms, most of all those of the first token.
    terms = 256 * T * K
    for found, right in zip((out, dq, dk, dv, dlog_g), (wanted.detach(), *gradients), strict=False):
        assert found is not None
        assert is_alone(found)
        bound = terms**0.5 * torch.finfo(torch.float32).eps * max(right.abs().max().item(), 1)
        torch.testing.assert_close(found.double(), right, rtol=0, atol=bound)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_gated_sums_over_the_same_scores(
    degree: int, sizes: tuple[int, int, int, int, int, int]
) -> None:
    torch.manual_seed(0)
    B, T, H, G, K, V = sizes
    S = 3
    q, k, v = between((B, T, H, K)), between((B, T, G, K), strided=True), between((B, T, G, V))
    log_g = -torch.rand(B, T, G, S) * torch.tensor([0.0, 0.01, 3.0])
    log_g[:, T // 2, :, 1] = -200  # a reset, which is no difference of infinities in the formula
    value_scale, output_scale = torch.randn(B, T, G, S), torch.randn(B, T, H, S)
    inputs = [x.requires_grad_() for x in (q, k, v, log_g, value_scale, output_scale)]
    out = add_gated_sums(*inputs, degree=degree, scale=SCALE)
    dout = torch.randn(B, T, 1, 1).expand(out.shape)
    found = torch.autograd.grad(out, inputs, dout)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = out.new_zeros(out.shape).double()
    for n in range(S):
        gates, by, factor = (x[..., n] for x in wide[3:])
        one = formula(*wide[:2], wide[2] * by[..., None], gates, degree, normalize=False)
        wanted = wanted + one * factor[..., None]
    gradients = torch.autograd.grad(wanted, wide, dout.double())
    terms = 256 * T * K
    for x, right in zip((out, *found), (wanted, *gradients), strict=True):
        bound = terms**0.5 * torch.finfo(torch.float32).eps * max(right.abs().max().item(), 1)
        torch.testing.assert_close(x.double(), right, rtol=0, atol=bound)


def test_a_mean_may_have_a_huge_denominator() -> None:
    q, one = torch.full((1, 1, 1, 1), 1.1e19), torch.ones(1, 1, 1, 1)
    out, _ = power_attention(q, one, one, degree=2, form="attention", scale=1.0)
    assert out.item() == 1
