"""Random inputs of power attention, and its results and gradients by the definition in float64."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels import PowerState, power_attention, state_features
from longhaul.kernels.testing import assert_close

# Allowed multiple of the definition's error. Features sum terms of both signs where the definition
# raises one sum to a power, which cancels more digits the higher the degree, and gradients of gates
# are differences of long sums.
MULTIPLE_PER_DEGREE = 15.0


def has_backward(how: dict[str, Any]) -> bool:
    """Triton's recurrent form is only a kernel for decoding, without a backward."""
    return how.get("backend") != "triton" or how["form"] != "recurrent"


def inputs(T: int, K: int = 8, V: int = 4, H: int = 4, G: int = 2, B: int = 1) -> list[Tensor]:
    q, k = torch.randn(B, T, H, K).double(), torch.randn(B, T, G, K).double()
    v = torch.randn(B, T, G, V).double()
    return [q, k, v, logsigmoid(torch.randn(B, T, G).double() + 2)]


def log_gates(B: int, T: int, G: int, gates: str) -> Tensor:
    """(B, T, G), "soft", or "hard": a tenth of them resets, and 0.3 of them keep all."""
    log_g = logsigmoid(torch.randn(B, T, G) + 2)
    if gates == "hard":
        log_g[torch.rand(log_g.shape) < 0.1] = -torch.inf
        log_g[torch.rand(log_g.shape) < 0.3] = 0
    return log_g


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 2
    H: int = 2
    G: int = 1
    K: int = 5
    V: int = 3
    degree: int = 2
    normalize: bool = True
    gates: str = "soft"
    state: str = "of some past"  # "none", or "arbitrary", which is not a sum of features of keys

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random inputs; q, k and v in `dtype`, the others in float32."""
        B, P = self.B, state_features(self.K, self.degree)
        tensors = {
            "q": torch.randn(B, self.T, self.H, self.K),
            "k": torch.randn(B, self.T, self.G, self.K),
            "v": torch.randn(B, self.T, self.G, self.V),
        }
        if self.normalize and (
            self.degree == 1 or self.gates == "hard" or self.state == "arbitrary"
        ):
            # Positive features give a denominator worth dividing by at degree 1. After a reset
            # a row has one key, and its gradient is a difference of equal terms over (q·k)².
            tensors["q"], tensors["k"] = tensors["q"].abs() + 0.1, tensors["k"].abs() + 0.1
        tensors = {name: x.to(dtype) for name, x in tensors.items()}
        if self.gates != "none":
            tensors["log_g"] = log_gates(B, self.T, self.G, self.gates)
        if self.state == "arbitrary":
            tensors["kv"] = torch.randn(B, self.G, P, self.V)
            tensors["norm"] = torch.rand(B, self.G, P) + 3
        elif self.state == "of some past":
            past = torch.randn(B, 7, self.G, self.K).abs()
            _, state = power_attention(
                past,
                past,
                torch.randn(B, 7, self.G, self.V),
                degree=self.degree,
                output_final_state=True,
                backend="reference",
            )
            assert state is not None
            assert state.kv.shape == (B, self.G, P, self.V)
            tensors["kv"], tensors["norm"] = state
        return tensors

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """All results, and the gradients of a random linear function of them."""
        leaves = {name: x.detach().to(dtype) for name, x in inputs.items()}
        if dtype != torch.float64:
            for name in ("log_g", "kv", "norm"):
                if name in inputs:
                    leaves[name] = inputs[name].detach().float()
        for x in leaves.values() if has_backward(how) else ():
            x.requires_grad_()
        state = PowerState(leaves["kv"], leaves["norm"]) if "kv" in leaves else None
        out, after = power_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            leaves.get("log_g"),
            degree=self.degree,
            normalize=self.normalize,
            initial_state=state,
            output_final_state=self.state != "none",
            **how,
        )
        assert out.dtype == dtype
        results = {"out": out}
        if after is not None:
            results |= {"final kv": after.kv, "final norm": after.norm}
        if not has_backward(how):
            return results
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
            for x in results.values()
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def check(self, dtype: torch.dtype, **how: Any) -> None:
        inputs, oracle, definition = expected(self, dtype)
        actual = self.run(inputs, dtype, **how)
        multiple = MULTIPLE_PER_DEGREE * max(self.degree, 2)
        names = [name for name in oracle if has_backward(how) or not name.startswith("d")]
        assert list(actual) == names
        for name in names:
            assert_close(actual[name], oracle[name], definition[name], multiple=multiple, name=name)


@cache
def expected(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """Inputs, the results of the definition in float64, and its results in `dtype`."""
    torch.manual_seed(0)
    inputs = case.inputs(dtype)
    oracle = case.run(inputs, torch.float64, backend="reference")
    rounded = torch.float32 if dtype == torch.float64 else dtype
    return inputs, oracle, case.run(inputs, rounded, backend="reference")
