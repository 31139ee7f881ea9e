"""The cross-entropy of rows of logits and its gradient, against float64."""

from dataclasses import replace

import pytest
import torch

from longhaul.kernels.backend import Backend
from longhaul.kernels.cross_entropy import cross_entropy_
from longhaul.kernels.cross_entropy.verify import LossCase
from longhaul.kernels.verify.cases import check

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
        LossCase(name="capped, several blocks", T=3, vocabulary=9000, softcap=4.0),
        LossCase(name="large and capped", T=2, vocabulary=300, content="large", softcap=30.0),
        LossCase(name="z-loss", T=5, vocabulary=300, z_loss=0.3),
        LossCase(name="capped, z-loss", T=5, vocabulary=5001, softcap=2.0, z_loss=0.3),
    ],
    ids=lambda case: case.name,
)
def test_losses_and_gradient_are_those_of_the_definition(
    case: LossCase, backend: Backend, dtype: str
) -> None:
    (record,) = check(replace(case, dtype=dtype), CPU, backend)
    assert record["faults"] == []
    assert set(record["tensors"]) == {"losses", "normalizers", "dlogits"}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_logits_are_kept_where_no_gradient_is_wanted(
    softcap: float | None, backend: Backend
) -> None:
    logits, target = torch.randn(3, 300), torch.tensor([5, 0, 299])
    before = logits.clone()
    losses, normalizers = cross_entropy_(
        logits, target, with_gradient=False, softcap=softcap, backend=backend
    )
    assert torch.equal(logits, before)
    y = before if softcap is None else softcap * (before / softcap).tanh()
    torch.testing.assert_close(losses, -y.log_softmax(1)[range(3), target])
    torch.testing.assert_close(normalizers, y.logsumexp(1))


def test_float64_stays_float64() -> None:
    logits, target = torch.randn(2, 30, dtype=torch.float64), torch.tensor([5, 0])
    wanted = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    losses, _ = cross_entropy_(logits, target, with_gradient=True)
    torch.testing.assert_close(losses, wanted, rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="'triton' cannot run: it has no float64"):
        cross_entropy_(logits, target, with_gradient=True, backend="triton")


def test_strided_targets_are_read_and_strided_logits_refused() -> None:
    logits, target = torch.randn(3, 30), torch.tensor([[5, 1], [0, 2], [29, 3]])[:, 0]
    wanted = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    losses, _ = cross_entropy_(logits.clone(), target, with_gradient=True, backend="triton")
    torch.testing.assert_close(losses, wanted)
    with pytest.raises(ValueError, match=r"logits: found strides \(1, 3\), wanted a contiguous"):
        cross_entropy_(torch.randn(30, 3).mT, target, with_gradient=True)


@pytest.mark.parametrize("unknown", [-100, 30])
def test_an_unknown_id_is_never_a_loss(unknown: int) -> None:
    target = torch.tensor([5, unknown])
    losses, _ = cross_entropy_(torch.randn(2, 30), target, with_gradient=True, backend="triton")
    assert losses.isnan().tolist() == [False, True]
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_(torch.randn(2, 30), target, with_gradient=True, backend="torch")
