"""`power_attention_of_part` against the definition of whole sequences, with every gradient."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from power_cases import MULTIPLE_PER_DEGREE, Case, expected
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels import PowerState, power_attention_of_part
from longhaul.kernels.power.cost import power_backward_flops, power_flops, power_state_flops
from longhaul.kernels.testing import assert_close

OFFSETS = (0, 1, 20, 57)
"""Where the parts of a sequence begin and end."""


def in_parts(
    case: Case,
    inputs: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    backend: str = "torch",
    chunk_size: int = 8,
    unused: Sequence[str] = (),
) -> dict[str, Tensor]:
    """As `Case.run`: each part as a rank of its own would compute it, in one graph."""
    leaves = {
        name: x.detach().to(dtype).requires_grad_(name not in unused) for name, x in inputs.items()
    }
    tokens = [leaves.get(name) for name in ("q", "k", "v", "log_g")]
    states, outs = [PowerState(leaves["kv"], leaves["norm"])], []
    for start, end in pairwise(OFFSETS):
        q, k, v, log_g = (None if x is None else x[:, start:end] for x in tokens)
        assert q is not None
        assert k is not None
        assert v is not None

        def before(own: PowerState, decay: Tensor) -> PowerState:
            kv, norm = states[-1]
            decay = decay[..., None]
            states.append(PowerState(own.kv + decay[..., None] * kv, own.norm + decay * norm))
            return states[-2]

        how = {"degree": case.degree, "normalize": case.normalize}
        how |= {"backend": backend, "chunk_size": chunk_size}
        outs.append(power_attention_of_part(q, k, v, log_g, before, **how))
    kv, norm = states[-1]
    results = {"out": torch.cat(outs, dim=1), "final kv": kv, "final norm": norm}
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in results.values()
    )
    used = {name: x for name, x in leaves.items() if name not in unused}
    grads = torch.autograd.grad(loss, list(used.values()))
    results |= {f"d{name}": grad for name, grad in zip(used, grads, strict=True)}
    return {name: x.detach() for name, x in results.items()}


RAGGED = Case(T=57)
CASES = [
    RAGGED,
    Case(T=57, gates="none", normalize=False),
    Case(T=57, gates="hard", H=4, G=2),
    Case(T=57, degree=1, state="arbitrary"),
    Case(T=57, degree=4, K=9, B=1, H=1),
]


@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_equals_the_definition(case: Case, chunk_size: int) -> None:
    inputs, wanted, _ = expected(case, torch.float64)
    found = in_parts(case, inputs, torch.float64, chunk_size=chunk_size)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(("torch", case) for case in CASES),
        ("triton", CASES[2]),
        pytest.param("triton", CASES[0], marks=pytest.mark.wide),
        pytest.param("triton", CASES[1], marks=pytest.mark.wide),
        pytest.param("triton", CASES[3], marks=pytest.mark.wide),
        pytest.param("triton", CASES[4], marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_float32_equals_the_definition(backend: str, case: Case) -> None:
    inputs, oracle, definition = expected(case, torch.float32)
    found = in_parts(case, inputs, torch.float32, backend=backend, chunk_size=16)
    multiple = MULTIPLE_PER_DEGREE * max(case.degree, 2)
    assert found.keys() == oracle.keys()
    for name, wanted in oracle.items():
        assert_close(found[name], wanted, definition[name], multiple=multiple, name=name)


@pytest.mark.parametrize("unused", [("q", "k"), ("kv", "norm"), ("q", "k", "v", "log_g")])
def test_gradients_that_nobody_needs_change_no_others(unused: Sequence[str]) -> None:
    inputs, wanted, _ = expected(RAGGED, torch.float64)
    found = in_parts(RAGGED, inputs, torch.float64, unused=unused)
    assert len(found) == len(wanted) - len(unused)
    for name, x in found.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-9, atol=1e-9)


def test_there_is_no_reference_for_a_part() -> None:
    q, k, v = torch.ones(3, 1, 5, 2, 4).unbind(0)
    with pytest.raises(ValueError, match="backend: found 'reference', wanted auto, torch or"):
        power_attention_of_part(q, k, v, None, lambda own, _: own, backend="reference")


def test_each_state_costs_one_product_more_than_in_one_call() -> None:
    q, k, v = (torch.randn(1, 256, 1, 4, requires_grad=True) for _ in range(3))
    sizes = 256, 4, 4, 2
    product = power_state_flops(*sizes)
    with FlopCounterMode(display=False) as counter:
        out = power_attention_of_part(q, k, v, None, lambda own, _: own, chunk_size=64)
    assert counter.get_total_flops() == power_flops(*sizes, "chunked", 64) + product
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == power_backward_flops(*sizes, "chunked", 64) + product
