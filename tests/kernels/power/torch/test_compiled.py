"""The compiled functions of degrees 1 and 2, against float64; and the op without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longhaul.kernels import native, power_attention, state_features
from longhaul.kernels.power.torch import compiled
from longhaul.kernels.power.torch.features import StateToRead, expand, multiplicity
from longhaul.kernels.power.torch.gated_sums import add_gated_sums

pytestmark = pytest.mark.skipif(
    not compiled.attends(2, torch.empty(0)), reason="there is no C++ compiler"
)

# Rows, K, V with the norm, tokens: fewer than any vector, more than one span, and ragged.
SIZES = [(1, 8, 2, 1), (2, 40, 14, 33), (3, 16, 65, 70), (1, 64, 27, 128)]


def close(found: Tensor, wanted: Tensor, terms: int) -> None:
    """Sums of that many products in float32 are off by about the root of it times its epsilon."""
    bound = 4 * terms**0.5 * torch.finfo(torch.float32).eps * wanted.abs().max().item()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=bound)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_with_features(sizes: tuple[int, int, int, int]) -> None:
    rows, K, V, C = sizes
    P = state_features(K, 2)
    x, values, before = torch.randn(rows, K, C), torch.randn(rows, V, C), torch.randn(rows, K, C)
    state = torch.randn(rows, V, P)
    dx, out = before.clone(), torch.empty(rows, V, C)
    features = compiled.CompiledFeatureMap(x, dx)
    read = StateToRead(state, [])
    features.read(read, out)
    features.contract(read, values)

    wide = x.double().mT.requires_grad_()
    to_read = state.double() * multiplicity(K, 2, wide)
    wanted = to_read @ expand(wide, 2).mT
    close(out, wanted.detach(), P)
    (gradient,) = torch.autograd.grad(wanted, wide, values.double())
    close(dx, gradient.mT + before, V * K)

    keep = torch.rand(rows, 1, 1)
    added = values.double() @ expand(wide.detach(), 2)
    kept = state.clone()
    features.add_to(kept, values, keep)
    close(kept, keep.double() * state + added, C)
    features.add_to(kept, values, 1.0)
    close(kept, keep.double() * state + 2 * added, C)
    written = torch.full_like(state, torch.nan)
    features.add_to(written, values, 0.0)
    close(written, added, C)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("threads", [1, 5])  # with five, each takes some rows of V of a state
def test_a_pass_over_chunks(threads: int, is_zero: bool) -> None:
    rows, K, V, C, blocks, chunks, updates = 2, 16, 30, 37, 2, 3, 2
    P = state_features(K, 2)
    state = torch.full((rows, V, P), torch.nan) if is_zero else torch.randn(rows, V, P)
    queries = torch.randn(2, chunks * blocks, rows, K, C)
    k, values = (torch.randn(chunks * blocks, rows, width, C) for width in (K, V))
    keep, norms = torch.rand(chunks, rows, 1, 1), torch.empty(chunks, rows, 1, P)
    found, after = torch.empty(2, chunks * blocks, rows, V, C), state.clone()
    with torch_threads(threads):
        compiled.read_and_update(
            after,
            list(zip(queries, found, strict=True)),
            norms,
            (k, values),
            keep,
            is_zero=is_zero,
            chunks=chunks,
            updates=updates,
        )

    wide = torch.zeros(rows, V, P).double() if is_zero else state.double()
    orderings = multiplicity(K, 2, wide)
    for chunk in range(chunks):
        close(norms[chunk], wide[:, -1:], C * blocks)
        for n in range(chunk * blocks, (chunk + 1) * blocks):
            wanted = (wide * orderings) @ expand(queries[:, n].double().mT, 2).mT
            close(found[:, n], wanted, P)
        if chunk < updates:
            wide = wide * keep[chunk].double()
            for n in range(chunk * blocks, (chunk + 1) * blocks):
                wide = wide + values[n].double() @ expand(k[n].double().mT, 2)
    close(after, wide, C * blocks)


def log_decays(blocks: int, rows: int, C: int) -> Tensor:
    """Sums of log2 γ over the chunk of each row, (items, 1, tokens): weak and strong gates, with a
    reset."""
    log2_g = -torch.rand(rows, blocks * C, dtype=torch.float64)
    log2_g[::2] *= 0.05
    log2_g[1::2] *= 9
    log2_g[:, C // 2] = -192
    return log2_g.cumsum(1).view(rows, blocks, C).transpose(0, 1).reshape(-1, 1, C)


@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("degree", [1, 2])
def test_attention_inside_chunks(
    degree: int, sizes: tuple[int, int, int, int], blocks: int, has_gates: bool
) -> None:
    rows, K, V, C = sizes
    items, has_past = blocks * rows, blocks > 1
    q, k = torch.randn(2, items, K, C).unbind(0)
    v, dnum, before = torch.randn(3, items, V, C).unbind(0)
    log_decay = log_decays(blocks, rows, C) if has_gates else None
    num = torch.empty(items, V, C)
    compiled.attend(q, k, v, log_decay, num, degree, rows, has_past)

    def by_row(x: Tensor) -> Tensor:
        """(rows, width, all tokens) of (items, width, tokens)."""
        return x.unflatten(0, (blocks, rows)).permute(1, 2, 0, 3).flatten(2)

    wide = [by_row(x).double().requires_grad_() for x in (q, k, v)]
    weights = (wide[1].mT @ wide[0]) ** degree  # (rows, keys, queries)
    if log_decay is not None:
        sums = by_row(log_decay)
        weights = weights * torch.exp2((sums - sums.mT).clamp(max=0))
    wanted = wide[2] @ weights.triu()
    terms = 4 * K * blocks * C
    close(by_row(num), wanted.detach(), terms)

    gradients = torch.autograd.grad(wanted, wide, by_row(dnum).double())
    for adds in (False, True):
        into = torch.full((items, K, C), torch.nan), before[:, :1].repeat(1, K, 1), before.clone()
        settings = degree, rows, has_past
        compiled.attend_backward(q, k, v, log_decay, dnum, into, *settings, adds=adds)
        for n, (found, gradient) in enumerate(zip(into, gradients, strict=True)):
            start = (before[:, :1].repeat(1, K, 1), before)[n - 1] if adds and n else None
            total = gradient if start is None else gradient + by_row(start)
            close(by_row(found), total, terms)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 1, 3, 17, 40), (1, 2, 2, 64, 16)])
def test_transposed_copies(shape: tuple[int, ...]) -> None:
    n, b, h, width, tokens = shape
    buffer = torch.randn(n, b, h, width + 1, tokens)[:, :, :, :width]
    outside = torch.randn(b, n, tokens, h, width).permute(1, 0, 3, 4, 2)
    for source, target in ((buffer, outside), (outside, buffer)):
        for add in (False, True):
            result = target.clone(memory_format=torch.preserve_format)
            compiled.copy_transposed(source, result, scale=0.5, add=add)
            assert torch.equal(result, 0.5 * source + (target if add else 0))


def everything(threads: int, degree: int) -> list[Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 300, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 300, 2, 16, requires_grad=True) for _ in range(2))
    log_g = torch.nn.functional.logsigmoid(torch.randn(2, 300, 2) + 3).requires_grad_()
    results = []
    with torch_threads(threads):
        for form in ("chunked", "attention"):
            # At degree 1 the sum of a row's weights may almost cancel.
            options: Any = {"degree": degree, "normalize": degree == 2, "chunk_size": 128}
            out, _ = power_attention(q, k, v, log_g, form=form, **options)
            results += [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, log_g))]
    return results


@pytest.mark.parametrize("threads", [3, 10])  # with ten, several share the queries of a head
@pytest.mark.parametrize("degree", [1, 2])
def test_threads_change_no_bit(degree: int, threads: int) -> None:
    for one, other in zip(everything(1, degree), everything(threads, degree), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("degree", [1, 2])
def test_threads_change_no_bit_of_gated_sums(degree: int) -> None:
    inputs = [torch.randn(2, 300, heads, width) for heads, width in ((4, 8), (2, 8), (2, 5))]
    inputs += [-torch.rand(2, 300, 2, 3), torch.randn(2, 300, 2, 3), torch.randn(2, 300, 4, 3)]
    leaves = [x.requires_grad_() for x in inputs]
    results = []
    for threads in (1, 3):
        with torch_threads(threads):
            out = add_gated_sums(*leaves, degree=degree, scale=0.5)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("degree", [1, 2])
def test_the_op_needs_no_compiler(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = everything(1, degree)
    monkeypatch.setattr(compiled, "_load", lambda: None)
    monkeypatch.setattr(native, "serves", lambda *tensors: False)
    for one, other in zip(everything(1, degree), wanted, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_a_gate_that_is_no_number_is_seen(form: Any) -> None:
    q, log_g = torch.randn(1, 200, 1, 8), torch.zeros(1, 200, 1)
    log_g[0, 150] = torch.nan
    out, _ = power_attention(q, q, q, log_g, degree=2, form=form, chunk_size=64)
    assert out[0, 150:].isnan().all()
