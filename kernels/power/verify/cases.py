"""Calls of power attention to check: outputs, states and all gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels.backend import Backend
from longhaul.kernels.power import (
    PowerState,
    power_attention,
    power_attention_step,
    power_state,
)
from longhaul.kernels.shapes import state_features
from longhaul.kernels.verify.cases import Case

# The quadratic definition is the oracle up to so many tokens and entries of its largest tensor.
_LONGEST_DEFINITION = 2048
_LARGEST_DEFINITION = 2**28
_BOTH = ("chunked", "attention")
_WIDE_STRIDE = 2 ** (31 - 17) + 64  # elements from a token to the next


@dataclass(frozen=True, kw_only=True)
class PowerCase(Case):
    """One call to check."""

    # "chunked", "attention"; "step" or "state" (the state alone) are checked by themselves
    forms: tuple[str, ...] = _BOTH
    B: int = 1
    H: int = 4
    G: int = 2
    K: int = 64
    V: int = 64
    degree: int = 2
    normalize: bool = True
    gates: str = "soft"  # "soft", "none", "ones", "hard" (some are 0 or 1), "reset" (one is 0)
    # "normal", "large", "orthogonal", "rotated" (orthogonal up to rounding), "wide" (large strides)
    content: str = "normal"
    documents: tuple[int, ...] = ()  # offsets of packed documents, without the last one
    is_continued: bool = False  # starts from an initial state and returns the final one
    has_bfloat16_state: bool = False  # of a single step, whose sums are then rounded once
    is_in_place: bool = False  # the first of several steps
    wanted: tuple[str, ...] = ()  # inputs that need a gradient; empty for all

    @property
    def multiple(self) -> float:
        """As for every case, times half the degree, at least 1.

        Features sum terms of both signs where the definition raises one sum to a power, and the
        cancellation grows with the degree. In 16 bits the rounding of the inputs dominates.
        """
        return super().multiple * max(self.degree, 2) / 2

    @property
    def gigabytes(self) -> float:
        """About how much memory of a GPU a process needs for it, which the oracle mostly takes."""
        context = 0.6
        width = self.H * (self.K + self.V) + self.G * (self.K + self.V)
        oracle = 12 * 8 * self.B * self.T * width
        if self.T <= _LONGEST_DEFINITION:
            oracle += 6 * 8 * self.B * self.H * self.T**2
        strided = 3 * 2 * self.T * _WIDE_STRIDE if self._is_wide_in_time else 0
        return context + (oracle + strided) / 1e9

    @property
    def _is_wide_in_time(self) -> bool:
        return self.content == "wide" and self.T > 2**16

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """q, k, v in the case's dtype; log_g, kv, norm in float32; none requires a gradient."""
        generator = torch.Generator(device).manual_seed(self.T + 7 * self.K + self.degree)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        B, T, H, G, K, V = self.B, self.T, self.H, self.G, self.K, self.V
        q, k, v = randn(B, T, H, K), randn(B, T, G, K), randn(B, T, G, V)
        if self.normalize:
            # The first row has one key, so its gradient is a difference of equal terms over (q·k)².
            q[:, 0], k[:, 0] = q[:, 0].abs() + 0.1, k[:, 0].abs() + 0.1
        if self.content == "large":
            # |q| and |k| become about 1,000.
            q, k = q * 1e3 * K**-0.5, k * 1e3 * K**-0.5
        if self.content in ("orthogonal", "rotated"):
            k[..., K // 2 :] = 0
            q[:, T // 2 :, :, : K // 2] = 0
        if self.content == "rotated":
            rotation = torch.linalg.qr(randn(K, K))[0]
            q, k = q @ rotation, k @ rotation
        has_short_rows = self.gates in ("hard", "reset") or self.documents
        if self.normalize and (self.degree == 1 or has_short_rows):
            # Positive features give a denominator worth dividing by at degree 1. After a reset, and
            # where a document begins, a row has one key: its gradient is a difference of equal
            # terms over (q·k)².
            q, k = q.abs() + 0.1, k.abs() + 0.1
        tensors = {"q": q, "k": k, "v": v}
        tensors = {name: x.to(self.torch_dtype) for name, x in tensors.items()}
        if self.content == "wide":
            tensors = {name: _with_wide_strides(x) for name, x in tensors.items()}
        if self.gates != "none":
            # The memory of the heads ranges from 8 to 3,000 tokens.
            log_g = logsigmoid(randn(B, T, G) + torch.linspace(8, 2, G, device=device))
            if self.gates == "ones":
                log_g = torch.zeros_like(log_g)
            if self.gates == "hard":
                draw = torch.rand(log_g.shape, generator=generator, device=device)
                log_g = log_g.masked_fill(draw < 0.1, -torch.inf).masked_fill(draw > 0.7, 0)
            if self.gates == "reset":
                log_g[:, T // 2] = -torch.inf
            tensors["log_g"] = log_g
        if self.is_continued:
            S, P = max(B, len(self.documents)), state_features(K, self.degree)
            past = randn(S, 7, G, K).abs()
            _, state = power_attention(
                past,
                past,
                randn(S, 7, G, V),
                degree=self.degree,
                form="chunked",
                output_final_state=True,
                backend="torch",
            )
            assert state is not None
            assert state.norm.shape == (S, G, P)
            tensors["kv"], tensors["norm"] = state
            if self.has_bfloat16_state:
                tensors["kv"] = state.kv.bfloat16().float()
        if "state" in self.forms:
            del tensors["q"]
        return tensors

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        """Output, final state, and the gradients of a random linear functional of them."""
        if how.get("form") == "step":
            return self.steps(inputs, how["backend"])
        wanted = self.wanted or tuple(inputs)
        leaves = {}
        for name, x in inputs.items():
            # A leaf keeps the strides of its input, as only another dtype makes a copy.
            is_rounded = name in ("q", "k", "v") or dtype == torch.float64
            given = x.to(dtype) if is_rounded else x
            leaves[name] = given.detach().requires_grad_(name in wanted and self.has_grads)
        cu_seqlens = None
        if self.documents:
            cu_seqlens = torch.tensor([*self.documents, self.T], device=inputs["k"].device)
        results = self._called(leaves, cu_seqlens, how)
        if self.has_grads:
            names = [name for name in leaves if name in wanted]
            # Rounded alike for every dtype, so that its rounding does not add to the error.
            generator = torch.Generator(inputs["k"].device).manual_seed(1)
            directions = [
                torch.randn(x.shape, generator=generator, device=x.device)
                .to(self.torch_dtype)
                .to(x.dtype)
                for x in results.values()
            ]
            grads = torch.autograd.grad(
                list(results.values()), [leaves[name] for name in names], directions
            )
            results |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def _called(
        self, leaves: dict[str, Tensor], cu_seqlens: Tensor | None, how: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Output and final state of the call; of a state alone, only that."""
        initial = PowerState(leaves["kv"], leaves["norm"]) if self.is_continued else None
        given: dict[str, Any] = {
            "degree": self.degree,
            "initial_state": initial,
            "cu_seqlens": cu_seqlens,
        }
        if "state" in self.forms:
            backend = how["backend"]
            state = power_state(
                leaves["k"], leaves["v"], leaves.get("log_g"), **given, backend=backend
            )
            return {"final kv": state.kv, "final norm": state.norm}
        out, after = power_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            leaves.get("log_g"),
            **given,
            normalize=self.normalize,
            output_final_state=self.is_continued,
            **how,
        )
        if after is None:
            return {"out": out}
        return {"out": out, "final kv": after.kv, "final norm": after.norm}

    @property
    def has_grads(self) -> bool:
        return "step" not in self.forms

    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Results of the definition or, where that is too large, of the torch backend."""
        entries = self.T * self.G * state_features(self.K, self.degree) * self.degree
        is_state = "state" in self.forms  # which has no definition of its own
        if not is_state and self.T <= _LONGEST_DEFINITION and entries <= _LARGEST_DEFINITION:
            return self.run(inputs, dtype, backend="reference")
        form = "attention" if self.degree > 2 else "chunked"
        return self.run(inputs, dtype, backend="torch", form=form)

    def steps(self, inputs: dict[str, Tensor], backend: Backend) -> dict[str, Tensor]:
        """Token by token, without gradients. Every second step is in place, never on the inputs."""
        state = PowerState(inputs["kv"].clone(), inputs["norm"].clone())
        if self.has_bfloat16_state:
            state = PowerState(state.kv.bfloat16(), state.norm)
        outputs = []
        with torch.no_grad():
            for t in range(self.T):
                now = {name: inputs[name][:, t : t + 1] for name in ("q", "k", "v", "log_g")}
                out, state = power_attention_step(
                    state,
                    *now.values(),
                    degree=self.degree,
                    normalize=self.normalize,
                    inplace=(t % 2 == 1) != self.is_in_place,
                    backend=backend,
                )
                outputs.append(out)
        return {"out": torch.cat(outputs, dim=1), "final kv": state.kv, "final norm": state.norm}

    def noise_bound(self, name: str, inputs: dict[str, Tensor]) -> float | None:
        if self.content != "rotated":
            return None
        return 10 * inputs["v"].abs().max().item() if name == "out" else torch.inf

    def other_faults(self, actual: dict[str, Tensor], oracle: dict[str, Tensor]) -> list[str]:
        if not self.has_bfloat16_state:
            return []
        return rounding_faults(actual["final kv"], oracle["final kv"])

    def shrunk(self, tokens: int, width: int) -> Case:
        T = min(self.T, tokens)
        # Documents of one token alone would leave no gradient to compare but rounding errors.
        count = min(len(self.documents), T // 3)
        documents = tuple(sorted({number * T // count for number in range(count)}))
        return replace(self, T=T, K=min(self.K, width), V=min(self.V, width), documents=documents)


def rounding_faults(kv: Tensor, exact: Tensor) -> list[str]:
    """What is wrong with sums that were rounded to bfloat16 at random, once."""
    size = exact.abs()
    error = kv.double() - exact
    # A sum of terms of both signs can be smaller than its error in float32.
    if not (error.abs() <= 2**-7 * size + 1e-5 * size.max()).all():
        return ["bfloat16 state: found an entry that is no neighbour of its sum"]
    is_large = size > 1e-2 * size.max()
    share = (error * exact.sign() / size)[is_large]
    faults = []
    if share.mean().abs() > 2**-11:
        faults.append(f"bfloat16 state: found sums off by {share.mean():.2g} on average, wanted 0")
    if share.abs().max() < 1.05 * 2**-8:
        faults.append("bfloat16 state: found sums rounded to nearest, wanted at random")
    return faults


def _with_wide_strides(x: Tensor) -> Tensor:
    """The same values with wide strides: 131,073 tokens span more than 2^31 elements."""
    T, H, K = x.shape[1:]
    token_stride = max(H * K, _WIDE_STRIDE) if T > 2**16 else 3 * H * K
    buffer = x.new_full((1, T, token_stride // K, K), torch.nan)
    buffer[:, :, :H] = x
    return buffer[:, :, :H]
