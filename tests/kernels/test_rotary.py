"""The rotation of pairs and its gradients, against complex multiplication in float64."""

import inspect

import pytest
import torch
from torch import Tensor

from longhaul.kernels.backend import Backend
from longhaul.kernels.rotary import rotate


def defined(x: Tensor, angle: Tensor) -> Tensor:
    """e^(i angle) (x_j + i x_(j + K/2)), as real and imaginary parts side by side."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def results(x: Tensor, angle: Tensor, direction: Tensor, rotated: Tensor) -> list[Tensor]:
    return [rotated.detach(), *torch.autograd.grad(rotated, (x, angle), direction)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("rows", "phases"),
    [
        ((2, 70, 3), (2, 70, 1)),  # one phase for all heads, from x
        ((2, 70, 3), (2, 70, 3)),  # of each head
        ((2, 3, 40), (1, 1, 40)),  # heads before tokens, positions shared by the batch
        ((2, 1, 3), (2, 1, 1)),  # one token
        ((1, 5, 1), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("pairs", [1, 12])
def test_rotation_and_gradients_are_those_of_complex_multiplication(
    backend: Backend, rows: tuple[int, ...], phases: tuple[int, ...], pairs: int
) -> None:
    # A view of a projection of q, k and v, as in a model.
    x = torch.randn(*rows, 6 * pairs)[..., : 2 * pairs].requires_grad_()
    angle = (7 * torch.randn(*phases, pairs)).requires_grad_()
    direction = torch.randn(*rows, 2 * pairs)
    wide = [a.detach().double() for a in (x, angle, direction)]
    wide_x, wide_angle = (a.requires_grad_() for a in wide[:2])
    wanted = results(wide_x, wide_angle, wide[2], defined(wide_x, wide_angle))
    turned = rotate(x, angle.cos(), angle.sin(), backend=backend)
    for one, other in zip(results(x, angle, direction, turned), wanted, strict=True):
        # A gradient of a shared phase is a sum over rows.
        bound = 4e-7 * (1 + other.abs().max().item()) * 10
        torch.testing.assert_close(one, other.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_gradient_of_equal_entries_is_taken(backend: Backend) -> None:
    """The gradient of a sum is one number with strides of 0."""
    x, angle = torch.randn(1, 9, 2, 4, requires_grad=True), torch.randn(1, 9, 1, 2)
    rotate(x, angle.cos(), angle.sin(), backend=backend).sum().backward()
    wanted = rotate(torch.ones_like(x), angle.cos(), -angle.sin(), backend="torch")
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    x, angle = torch.randn(1, 9, 2, 4).to(dtype), torch.randn(1, 9, 1, 2)
    turned = rotate(x, angle.cos(), angle.sin())
    assert turned.dtype == dtype
    exact = rotate(x.float(), angle.cos(), angle.sin())
    assert torch.equal(turned, exact.to(dtype))


def test_second_derivatives() -> None:
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True)

    def turned(x: Tensor, angle: Tensor) -> Tensor:
        return rotate(x, angle.cos(), angle.sin())

    assert torch.autograd.gradcheck(turned, (x, angle))
    assert torch.autograd.gradgradcheck(turned, (x, angle))


def test_second_derivatives_of_the_kernels_are_those_of_torch() -> None:
    x, angle = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 1, 2)
    found = []
    backends: tuple[Backend, ...] = ("torch", "triton")
    for backend in backends:
        leaves = [a.clone().requires_grad_() for a in (x, angle)]
        turned = rotate(leaves[0], leaves[1].cos(), leaves[1].sin(), backend=backend)
        first = torch.autograd.grad(turned.pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(a.square().sum() for a in first), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "phases"),
    [((1, 5, 2, 4), (2, 5, 1, 2)), ((1, 5, 2, 4), (1, 5, 1, 1)), ((3, 5, 2, 4), (2, 5, 1, 2))],
)
@pytest.mark.usefixtures("unchecked")
def test_phases_that_do_not_fit_are_refused(x: tuple[int, ...], phases: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"phases: found .*, wanted a phase for each pair"):
        rotate(torch.randn(x), torch.randn(phases), torch.randn(phases))


def test_a_kernel_that_cannot_run_is_named() -> None:
    x, phase = torch.randn(2, 5, 3, 4), torch.randn(1, 1, 1, 2)
    torch.testing.assert_close(rotate(x, phase, phase)[0], rotate(x[0], phase[0], phase[0]))
    with pytest.raises(ValueError, match="'triton' cannot run: its kernels take phases that"):
        rotate(x, phase, phase, backend="triton")
    with pytest.raises(ValueError, match="'reference' cannot run"):
        rotate(x, phase, phase, backend="reference")


def test_only_learned_phases_keep_x_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    x, phase = torch.randn(1, 5, 2, 4, requires_grad=True), torch.randn(1, 5, 1, 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotate(x, phase, phase)
        assert {len(t.untyped_storage()) for t in kept} == {len(phase.untyped_storage())}
        rotate(x, phase.clone().requires_grad_(), phase)
    assert any(t is x or t.shape == x.shape for t in kept)


def test_a_compiled_rotation_is_the_same() -> None:
    x, angle = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 1, 2)
    # Without the run-time checks of annotations, which cannot be traced.
    compiled = torch.compile(inspect.unwrap(rotate), backend="aot_eager", fullgraph=True)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(compiled(x, cos, sin), rotate(x, cos, sin))
