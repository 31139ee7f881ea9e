"""A softmax over key logits as gates is accurate where a difference of log sums is not."""

import torch

from longhaul.kernels import power_attention
from longhaul.modules.attention.parts.key_softmax import key_softmax
from longhaul.modules.documents import Documents

NOTHING = torch.full((1, 1), -torch.inf, dtype=torch.float64)


def softmax_mean(logit: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_i softmax_i(s_1 .. s_t) v_i for every t."""
    softmax = key_softmax(logit, Documents(logit), NOTHING)
    ones = torch.ones_like(v[..., None])
    out, _ = power_attention(
        ones,
        ones,
        (v * softmax.alpha)[..., None],
        softmax.log_g,
        degree=1,
        scale=1.0,
        normalize=False,
    )
    return out[..., 0]


def test_weights_sum_to_one_over_a_long_document_in_float32() -> None:
    torch.manual_seed(0)
    logit = 3 * torch.randn(1, 65_536, 1)
    total = softmax_mean(logit, torch.ones_like(logit))
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2e-5)


def test_late_weights_are_accurate_in_float32_after_a_large_mass() -> None:
    # After a mass of e^12, a float32 difference of L would be wrong by 10 % of 1 - gate.
    torch.manual_seed(0)
    logit, v = torch.randn(1, 4000, 1), torch.randn(1, 4000, 1)
    logit[:, 0] = 12.0
    wanted = torch.softmax(logit[0, :, 0].double(), 0) @ v[0, :, 0].double()
    torch.testing.assert_close(
        softmax_mean(logit, v)[0, -1, 0].double(), wanted, rtol=1e-4, atol=1e-6
    )


def test_a_huge_logit_does_not_overflow_or_change_earlier_outputs() -> None:
    torch.manual_seed(0)
    logit, v = torch.randn(2, 1, 100, 1).unbind(0)
    before = softmax_mean(logit, v)
    logit[:, 50], logit[:, 60] = 1e4, -1e4
    after = softmax_mean(logit, v)
    assert torch.equal(after[:, :50], before[:, :50])
    assert after.isfinite().all()
    torch.testing.assert_close(after[:, 50:], v[:, 50:51].expand(-1, 50, -1))
