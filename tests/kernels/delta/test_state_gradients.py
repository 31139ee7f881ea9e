"""Gradients where only the state is used, as in the summaries of parts of a sequence."""

import pytest
import torch

from longhaul.kernels import delta_rule


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [(), (4,)])
def test_the_state_alone_has_the_gradients_of_the_recurrence(
    erases: bool, channels: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    B, T, H, K, V = 2, 27, 2, 4, 5
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K, dtype=torch.float64), dim=-1)
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    beta = torch.rand(B, T, H, dtype=torch.float64)
    log_g = -torch.rand(B, T, H, *channels, dtype=torch.float64)
    state, probe = torch.randn(2, B, H, K, V, dtype=torch.float64).unbind(0)
    leaves = [one.requires_grad_() for one in (k, v, log_g, state, *([beta] if erases else []))]
    results = []
    for backend in ("torch", "reference"):
        _, after = delta_rule(
            k.detach(),
            k,
            v,
            beta if erases else None,
            log_g,
            initial_state=state,
            output_final_state=True,
            chunk_size=8,
            backend=backend,
        )
        results.append(torch.autograd.grad((after * probe).sum(), leaves))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
