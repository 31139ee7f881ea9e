"""The short convolution against its formula, in documents and in parts of a sequence."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from longhaul.modules.attention import attention_config
from longhaul.modules.attention.parts.short_convolution import ShortConvolution
from longhaul.modules.documents import Documents

B, T, CHANNELS = 2, 24, 5
LENGTHS = [1, 2, 3, 4, 14]  # of the documents of every row


def build(width: int = 4) -> ShortConvolution:
    torch.manual_seed(0)
    convolution = ShortConvolution(CHANNELS, width, bias=True).double()
    torch.nn.init.normal_(convolution.bias)
    return convolution


def inputs() -> Tensor:
    return torch.randn(B, T, CHANNELS, dtype=torch.float64, requires_grad=True)


def formula(convolution: ShortConvolution, x: Tensor) -> Tensor:
    """Token by token, of one document."""
    weight, bias = convolution.weight, convolution.bias
    rows = []
    for t in range(x.shape[1]):
        total = bias.expand(len(x), -1)
        for back in range(min(t + 1, weight.shape[2])):
            total = total + weight[:, 0, weight.shape[2] - 1 - back] * x[:, t - back]
        rows.append(silu(total))
    return torch.stack(rows, dim=1)


def assert_equal(convolution: ShortConvolution, x: Tensor, found: Tensor, wanted: Tensor) -> None:
    """Outputs, and gradients of inputs and parameters."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    probe, leaves = torch.randn_like(wanted), [x, *convolution.parameters()]
    gradients = (torch.autograd.grad(y, leaves, probe) for y in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [2, 4, 30])
def test_each_document_is_convolved_by_itself(width: int) -> None:
    convolution, x = build(width), inputs()
    is_first = torch.zeros(B, T, dtype=torch.bool)
    is_first[:, [0, *accumulate(LENGTHS[:-1])]] = True
    found, _ = convolution(x, Documents(x, is_first))
    separate = [formula(convolution, one) for one in x.split(LENGTHS, dim=1)]
    assert_equal(convolution, x, found, torch.cat(separate, dim=1))


@pytest.mark.parametrize("cuts", [[1], [2, 3], [5, 6, 7], [23]])
def test_a_state_goes_on_wherever_it_was_cut(cuts: list[int]) -> None:
    convolution, x = build(), inputs()
    state, outputs = None, []
    for start, end in pairwise([0, *cuts, T]):
        y, state = convolution(x[:, start:end], Documents(x[:, start:end]), state)
        outputs.append(y)
    assert_equal(convolution, x, torch.cat(outputs, dim=1), formula(convolution, x))
    assert torch.equal(state, x[:, -3:])


class Part:
    """One of the parts of x, which are all in this process."""

    def __init__(self, index: int, parts: tuple[Tensor, ...]) -> None:
        self.index, self.count, self.parts = index, len(parts), parts

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError("other parts than those before need not be asked")

    def exchange(self, *_: object) -> tuple[Tensor, ...]:
        raise AssertionError("a window has no state")

    def gather_before(self, reach: int, own: Tensor) -> tuple[Tensor]:
        kept = own.shape[1]
        assert torch.equal(own, self.parts[self.index][:, -kept:])
        first = max(0, self.index - reach)
        before = [one[:, -kept:] for one in self.parts[first : self.index]]
        return (torch.stack(before) if before else own.new_empty(0, *own.shape),)


@pytest.mark.parametrize("count", [2, 8, 12, 24])  # parts of 12, 3, 2 and 1 tokens
@pytest.mark.parametrize("packed", [False, True])
def test_parts_equal_the_sequence(count: int, packed: bool) -> None:
    convolution, x = build(), inputs()
    is_first = None
    if packed:
        is_first = torch.zeros(B, T, dtype=torch.bool)
        is_first[:, [0, *accumulate(LENGTHS[:-1])]] = True
    wanted, _ = convolution(x, Documents(x, is_first))
    parts = x.chunk(count, dim=1)
    outputs = [
        convolution(one, Documents(one, is_first, Part(index, parts)))[0]
        for index, one in enumerate(parts)
    ]
    assert_equal(convolution, x, torch.cat(outputs, dim=1), wanted)


def test_it_begins_as_the_convolution_of_torch_with_a_bias_of_zeros() -> None:
    convolution = ShortConvolution(2000, 4, bias=True)
    assert not convolution.bias.any()
    assert 0.49 < convolution.weight.abs().max() <= 0.5
    x = torch.randn(1, 20, 2000)
    found, _ = convolution(x, Documents(x))
    wanted = conv1d(x.mT, convolution.weight, padding=3, groups=2000)[..., :20].mT
    torch.testing.assert_close(found, silu(wanted))


@pytest.mark.parametrize("width", [-1, 1])
def test_a_width_that_mixes_nothing_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=rf"^short_convolution: found {width}, wanted 2 or more"):
        attention_config("retention")(short_convolution=width)
