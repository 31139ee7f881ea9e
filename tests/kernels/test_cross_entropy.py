"""The cross-entropy of rows of logits and its gradient, against float64."""

from dataclasses import replace

import pytest
import torch

from longhaul.kernels.backend import Backend
from longhaul.kernels.cross_entropy import cross_entropy_
from longhaul.kernels.verify.cases import check
from longhaul.kernels.verify.other_cases import LossCase

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton", "float32"), ("torch", "float32"), ("torch", "bfloat16"), ("torch", "float16")],
)
@pytest.mark.parametrize(
    "case",
    [
        LossCase(name="several blocks", T=3, vocabulary=9000),
        LossCase(name="one block", T=7, vocabulary=257),
        LossCase(name="one row, two ids", T=1, vocabulary=2),
        LossCase(name="large", T=2, vocabulary=4100, content="large"),
    ],
    ids=lambda case: case.name,
)
def test_losses_and_gradient_are_those_of_the_definition(
    case: LossCase, backend: Backend, dtype: str
) -> None:
    (record,) = check(replace(case, dtype=dtype), CPU, backend)
    assert record["faults"] == []
    assert set(record["tensors"]) == {"losses", "dlogits"}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_logits_are_kept_where_no_gradient_is_wanted(backend: Backend) -> None:
    logits, target = torch.randn(3, 300), torch.tensor([5, 0, 299])
    before = logits.clone()
    losses = cross_entropy_(logits, target, with_gradient=False, backend=backend)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, -before.log_softmax(1)[range(3), target])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_float64_stays_float64(backend: Backend) -> None:
    logits, target = torch.randn(2, 30, dtype=torch.float64), torch.tensor([5, 0])
    wanted = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    losses = cross_entropy_(logits, target, with_gradient=True, backend=backend)
    torch.testing.assert_close(losses, wanted, rtol=1e-14, atol=0)
