"""`longhaul bench delta`: both sides compute the same, and each has a row."""

import pytest
import torch

from longhaul.kernels import delta_rule
from longhaul.pipeline.benchmarks import delta, kernels
from longhaul.pipeline.cli import main


def test_plain_torch_computes_the_same() -> None:
    leaves = [x.detach().double().requires_grad_() for x in
              delta.call("delta_rule", 128, torch.device("cpu")).leaves]  # fmt: skip
    wanted, _ = delta_rule(*leaves)  # type: ignore[misc]
    found = delta.plain(*leaves, chunk_size=32)  # type: ignore[misc]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), leaves),
        torch.autograd.grad(wanted.sin().sum(), leaves),
        rtol=0,
        atol=1e-11,
    )


@pytest.mark.wide
def test_every_call_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delta, "_TOKENS", 128)
    monkeypatch.setattr(kernels, "_SECONDS_PER_ROW", 0.0)
    # In a process of its own the call would have its real length.
    monkeypatch.setattr(delta, "_peak", lambda *of: delta._bytes_of(*of) + 1)
    assert main(["bench", "delta"]) == 0
    *_, last = lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(delta._CALLS)
    assert last.endswith("plain, chunk 128")
