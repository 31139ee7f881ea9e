"""Calls of the delta rule to check: outputs, states and all gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels.backend import Backend
from longhaul.kernels.delta import delta_rule, delta_rule_step, delta_summary
from longhaul.kernels.delta.op import DeltaBackend
from longhaul.kernels.verify.cases import Case

# Up to so many tokens the recurrence is the oracle: autograd keeps a state for each of them.
_LONGEST_DEFINITION = 2048

Runner = Literal["torch", "triton", "fla"]


@dataclass(frozen=True, kw_only=True)
class DeltaCase(Case):
    """One call to check."""

    # "chunked", "recurrent"; "step" and "summary" are checked by themselves
    forms: tuple[str, ...] = ("chunked",)
    runs_on: Runner = "torch"
    B: int = 1
    H: int = 4
    G: int = 2
    K: int = 64
    V: int = 64
    gates: str = "scalar"  # "none", "scalar", "channel"
    decays: str = "soft"  # "soft", "strong", "hard" (some are 0 or 1), "reset" (one is 0)
    erases: bool = True
    strength_of_equal_keys: float = 0  # the beta at which all keys, which are one, are written
    documents: tuple[int, ...] = ()  # offsets of packed documents, without the last one
    is_continued: bool = False  # starts from an initial state and returns the final one

    @property
    def gigabytes(self) -> float:
        """About how much memory of a GPU a process needs for it, which the oracle mostly takes."""
        context = 0.6
        states = self.K * self.V if self.T <= _LONGEST_DEFINITION else 4 * (self.K + self.V)
        return context + 6 * 8 * self.B * self.T * self.H * states / 1e9

    @property
    def needs_gpu(self) -> bool:
        return self.runs_on != "torch"

    def backend(self, device: torch.device) -> DeltaBackend:
        return self.runs_on

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """q, k, v in the case's dtype; beta, log_g, state in float32; none requires a gradient."""
        generator = torch.Generator(device).manual_seed(self.T + 7 * self.K + self.V)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def rand(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        B, T, H, G, K, V = self.B, self.T, self.H, self.G, self.K, self.V
        q, k, v = randn(B, T, G, K), F.normalize(randn(B, T, G, K), dim=-1), randn(B, T, H, V)
        if self.strength_of_equal_keys:
            # Unlike 1, the norm of a rounded key may exceed 1, and states would grow.
            k = 0.99 * k[:, :1].repeat(1, T, 1, 1)
        tensors = {name: x.to(self.torch_dtype) for name, x in {"q": q, "k": k, "v": v}.items()}
        if self.erases:
            tensors["beta"] = (
                torch.full_like(v[..., 0], self.strength_of_equal_keys)
                if self.strength_of_equal_keys
                else 2 * rand(B, T, H)
            )
        if self.gates != "none":
            # The memory of the heads ranges from 8 to 3,000 tokens.
            widths = (K,) if self.gates == "channel" else ()
            shift = torch.linspace(8, 2, H, device=device).view(H, *(1 for _ in widths))
            log_g = logsigmoid(randn(B, T, H, *widths) + shift)
            draw = rand(*log_g.shape)
            if self.decays == "strong":
                log_g = log_g.masked_fill(draw < 0.3, -50)
            if self.decays == "hard":
                log_g = log_g.masked_fill(draw < 0.1, -torch.inf).masked_fill(draw > 0.7, 0)
            if self.decays == "reset":
                log_g[:, T // 2] = -torch.inf
            tensors["log_g"] = log_g
        if self.is_continued:
            tensors["state"] = randn(max(B, len(self.documents)), H, K, V)
        if "summary" in self.forms:
            del tensors["q"]
        return tensors

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """Output, final state, and the gradients of a random linear functional of them."""
        if how.get("form") == "step":
            return self._steps(inputs, how["backend"])
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: x.to(dtype if name in ("q", "k", "v") else wide)
            .detach()
            .requires_grad_(self._has_grads)
            for name, x in inputs.items()
        }
        results = self._called(leaves, how)
        if self._has_grads:
            # Rounded alike for every dtype, so that its rounding does not add to the error.
            generator = torch.Generator(inputs["k"].device).manual_seed(1)
            directions = [
                torch.randn(x.shape, generator=generator, device=x.device)
                .to(self.torch_dtype)
                .to(x.dtype)
                for x in results.values()
            ]
            grads = torch.autograd.grad(list(results.values()), list(leaves.values()), directions)
            results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def _called(self, leaves: dict[str, Tensor], how: dict[str, Any]) -> dict[str, Tensor]:
        """Output and final state of the call; of a summary, what the tokens do to a state."""
        k, v, beta, log_g = (leaves.get(name) for name in ("k", "v", "beta", "log_g"))
        assert k is not None
        assert v is not None
        if "summary" in self.forms:
            kept, added = delta_summary(k, v, beta, log_g, backend=how["backend"])
            return {"kept": kept, "added": added}
        offsets = [*self.documents, self.T]
        out, state = delta_rule(
            leaves["q"],
            k,
            v,
            beta,
            log_g,
            initial_state=leaves.get("state"),
            output_final_state=self.is_continued,
            cu_seqlens=torch.tensor(offsets, device=k.device) if self.documents else None,
            **how,
        )
        return {"out": out} if state is None else {"out": out, "final state": state}

    @property
    def _has_grads(self) -> bool:
        return "step" not in self.forms

    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Results of the recurrence or, of long sequences, of the chunked form in torch."""
        is_short = self.T <= _LONGEST_DEFINITION
        return self.run(inputs, dtype, backend="reference" if is_short else "torch")

    def _steps(self, inputs: dict[str, Tensor], backend: Backend) -> dict[str, Tensor]:
        """Token by token, without gradients. Every second step is in place, never on the inputs."""
        state, outputs = inputs["state"], []
        names = ("q", "k", "v", "beta", "log_g")
        with torch.no_grad():
            for t in range(self.T):
                now = [inputs[name][:, t : t + 1] if name in inputs else None for name in names]
                out, state = delta_rule_step(
                    state,
                    *now,  # type: ignore[arg-type]
                    inplace=t % 2 == 1,
                    backend=backend,
                )
                outputs.append(out)
        return {"out": torch.cat(outputs, dim=1), "final state": state}

    def shrunk(self, tokens: int, width: int) -> Case:
        T = min(self.T, tokens)
        # Documents of one token alone would leave no gradient to compare but rounding errors.
        count = min(len(self.documents), T // 3)
        documents = tuple(sorted({number * T // count for number in range(count)}))
        return replace(self, T=T, K=min(self.K, width), V=min(self.V, width), documents=documents)
