"""Random inputs of the delta rule, and its results and gradients by the recurrence in float64."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.kernels import delta_rule
from longhaul.kernels.testing import assert_close

# Allowed multiple of the recurrence's own error: sums over chunks are rounded in another order.
MULTIPLE = 24.0


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 2
    H: int = 2
    G: int = 1
    K: int = 5
    V: int = 3
    gates: Literal["none", "scalar", "channel"] = "scalar"
    erases: bool = True
    has_state: bool = True
    inputs_are: str = "random"

    def inputs(self) -> dict[str, Tensor]:
        """Random inputs in float32, the absent ones left out."""
        B, T, H, G, K = self.B, self.T, self.H, self.G, self.K
        tensors = {
            "q": torch.randn(B, T, G, K),
            "k": F.normalize(torch.randn(B, T, G, K), dim=-1),
            "v": torch.randn(B, T, H, self.V),
            "beta": 2 * torch.rand(B, T, H),
            "log_g": -0.3 * torch.rand(B, T, H, K),
            "state": torch.randn(B, H, K, self.V),
        }
        if self.gates == "scalar":
            tensors["log_g"] = tensors["log_g"][..., 0].contiguous()
        log_g = tensors["log_g"]
        match self.inputs_are:
            case "gates of 0 and 1":
                log_g[torch.rand(log_g.shape) < 0.1] = -torch.inf
                log_g[torch.rand(log_g.shape) < 0.3] = 0
            case "strong gates":
                log_g[torch.rand(log_g.shape) < 0.3] = -50
            case "beta 0 and 2":
                tensors["beta"] = 2.0 * (torch.rand(B, T, H) < 0.7)
                log_g.zero_()
            case "keys of 0":
                tensors["k"][torch.rand(B, T, G) < 0.3] = 0
            case "equal keys":
                tensors["k"] = tensors["k"][:, :1].repeat(1, T, 1, 1)
        absent = {"log_g": self.gates == "none", "beta": not self.erases}
        absent["state"] = not self.has_state
        return {name: x for name, x in tensors.items() if not absent.get(name)}

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """All results, and the gradients of a random linear function of them."""
        leaves = {
            name: x.to(dtype if name in "qkv" or dtype == torch.float64 else torch.float32)
            for name, x in inputs.items()
        }
        for x in leaves.values():
            x.requires_grad_()
        out, state = delta_rule(
            *(leaves.get(name) for name in ("q", "k", "v", "beta", "log_g")),  # type: ignore[arg-type]
            initial_state=leaves.get("state"),
            output_final_state=True,
            **how,
        )
        assert state is not None
        assert out.dtype == dtype
        results = {"out": out, "final state": state}
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
            for x in results.values()
        )
        # It raises where a gradient is None.
        gradients = torch.autograd.grad(loss, list(leaves.values()))  # type: ignore[arg-type]
        results |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def check(self, dtype: torch.dtype, **how: Any) -> None:
        inputs, oracle, definition = expected(self, dtype)
        actual = self.run(inputs, dtype, **how)
        assert list(actual) == list(oracle)
        for name, x in actual.items():
            assert_close(x, oracle[name], definition[name], multiple=MULTIPLE, name=name)


@cache
def expected(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """Inputs, the results of the recurrence in float64, and its results in `dtype`."""
    torch.manual_seed(0)
    inputs = case.inputs()
    for name in "qkv":
        inputs[name] = inputs[name].to(dtype)
    oracle = case.run(inputs, torch.float64, backend="reference")
    rounded = torch.float32 if dtype == torch.float64 else dtype
    return inputs, oracle, case.run(inputs, rounded, backend="reference")
