"""The public functions: check, choose, call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.kernels.backend import Backend, resolve_backend
from longhaul.kernels.power.chunked import power_attention_chunked
from longhaul.kernels.power.cost import Form, choose_chunk_size, choose_form
from longhaul.kernels.power.recurrent import power_attention_recurrent, recurrent_step
from longhaul.kernels.power.reference import power_attention_reference
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.shapes import check_degree, state_features

_INPUT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call's settings, with everything chosen."""

    degree: int
    scale: float
    normalize: bool
    output_final_state: bool
    chunk_size: int | None
    form: str

    def one_sequence(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None
    ) -> tuple[Tensor, PowerState | None]:
        """Every row of the batch is one document."""
        B, T, _, K = q.shape
        G, V = v.shape[2:]
        form = choose_form(T, K, V, self.degree) if self.form == "auto" else self.form
        after: PowerState | None
        if form == "reference":
            kv, norm = (None, None) if state is None else state
            out, *parts = power_attention_reference(
                q,
                k,
                v,
                log_g,
                kv,
                norm,
                degree=self.degree,
                scale=self.scale,
                normalize=self.normalize,
            )
            after = PowerState(*parts)
        elif form == "recurrent":
            dtype = torch.promote_types(q.dtype, torch.float32)
            if state is None:
                P = state_features(K, self.degree)
                state = PowerState(k.new_zeros(B, G, P, V), k.new_zeros(B, G, P))
            out, after = power_attention_recurrent(
                q.to(dtype),
                k.to(dtype),
                v.to(dtype),
                None if log_g is None else log_g.to(dtype),
                PowerState(state.kv.to(dtype), state.norm.to(dtype)),
                degree=self.degree,
                scale=self.scale,
                normalize=self.normalize,
            )
            out = out.to(q.dtype)
        else:
            # The attention form is the chunked form with a single chunk: without states there is
            # nothing to carry, and no feature is ever built.
            chunk_size = self.chunk_size or choose_chunk_size(T, K, V, self.degree)
            out, after = power_attention_chunked(
                q,
                k,
                v,
                log_g,
                state,
                chunk_size=T if form == "attention" else min(chunk_size, T),
                output_final_state=self.output_final_state,
                degree=self.degree,
                scale=self.scale,
                normalize=self.normalize,
            )
        return out, after if self.output_final_state else None

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None,
        state: PowerState | None,
        offsets: list[int],
    ) -> tuple[Tensor, PowerState | None]:
        """One document after the other: nothing can leak, and each has states of its own."""
        lengths = [end - start for start, end in pairwise(offsets)]
        # A split has one backward for all parts, where N slices would each fill a whole gradient.
        q_parts, k_parts, v_parts = (torch.split(x, lengths, dim=1) for x in (q, k, v))
        gates = None if log_g is None else torch.split(log_g, lengths, dim=1)
        states = None if state is None else (torch.split(state.kv, 1), torch.split(state.norm, 1))
        results = [
            self.one_sequence(
                q_parts[n],
                k_parts[n],
                v_parts[n],
                None if gates is None else gates[n],
                None if states is None else PowerState(states[0][n], states[1][n]),
            )
            for n in range(len(lengths))
        ]
        out = torch.cat([out for out, _ in results], dim=1)
        finals = [after for _, after in results if after is not None]
        if not finals:
            return out, None
        kv, norm = (torch.cat(part) for part in zip(*finals, strict=True))
        return out, PowerState(kv, norm)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name}: found shape {tuple(x.shape)}, wanted (B, T, heads, width)")
        if x.dtype != q.dtype or x.dtype not in _INPUT_DTYPES:
            raise ValueError(
                f"{name}: found {x.dtype}, wanted one floating-point dtype for q, k and v"
            )
    B, T, H, K = q.shape
    G = k.shape[2]
    if k.shape != (B, T, G, K):
        raise ValueError(f"k: found shape {tuple(k.shape)}, wanted {(B, T, G, K)} as q has it")
    if v.shape[:3] != (B, T, G):
        raise ValueError(f"v: found shape {tuple(v.shape)}, wanted ({B}, {T}, {G}, V) as k has it")
    if H % G:
        raise ValueError(f"k: found {G} heads, wanted a divisor of the {H} heads of q")
    if log_g is not None and log_g.shape != (B, T, G):
        raise ValueError(f"log_g: found shape {tuple(log_g.shape)}, wanted {(B, T, G)} as k has it")
    if log_g is not None and log_g.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log_g: found {log_g.dtype}, wanted float32: 16 bits lose slow decays")


def _check_state(state: PowerState, N: int, G: int, K: int, V: int, degree: int) -> None:
    P = state_features(K, degree)
    for name, x, shape in (("kv", state.kv, (N, G, P, V)), ("norm", state.norm, (N, G, P))):
        if x.shape != shape:
            raise ValueError(f"state.{name}: found shape {tuple(x.shape)}, wanted {shape}")


def _check_offsets(cu_seqlens: Tensor, B: int, T: int) -> list[int]:
    if B != 1:
        raise ValueError(f"cu_seqlens: found B = {B}, wanted 1: documents are packed along T")
    offsets: list[int] = cu_seqlens.tolist()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != T:
        raise ValueError(f"cu_seqlens: found {_short(offsets)}, wanted offsets from 0 to {T}")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens: found document {n} from {start} to {end}, wanted at least one token"
            )
    return offsets


def _short(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"[{offsets[0]}, …, {offsets[-1]}]"


def power_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None = None,
    *,
    degree: int = 2,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: PowerState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B T H V"], PowerState | None]:
    """Causal attention with weights exp(G_t − G_i) (scale q_t·k_i)^degree, in time linear in T.

    Args:
        q: queries. Any float dtype; float64 is computed in float64, the rest in float32.
        k, v: keys and values in the dtype of q; G divides H, as grouped-query attention has it.
        log_g: log of the decay per token and key head, ≤ 0; −inf forgets everything before the
            token. None means no decay. G_t is its running sum.
        degree: 1, or an even power. The state has about K^degree / degree! rows.
        scale: factor on q·k before the power. None means K^(−1/2).
        normalize: divide by the sum of the weights. A sum below 1e-30 counts as 1e-30.
        initial_state: state that a call before this one returned; (B, …), or (N, …) if packed.
        output_final_state: return the state after the last token (of every document).
        cu_seqlens: N + 1 ascending offsets of the documents packed along T (B must be 1): from 0
            to T, no document empty. None means that a row of the batch is one document.
        chunk_size: tokens per chunk of the chunked form, None picks it by cost. It changes speed
            and memory, never the result.
        form: "attention" (quadratic), "chunked" (linear), "recurrent" (one token at a time) or
            "auto" (by cost). Results agree to rounding.
        backend: "reference" (the formula, quadratic, ignores `form`), "torch", "triton", "auto".

    Returns:
        Weighted mean (or sum) of v over the past in the dtype of q, and the state or None.

    Raises:
        ValueError: naming the argument, the value found and the value wanted.

    Cost: O(T · C · K + T · P · V) time in the chunked form, O(T) memory; see cost.py.
    Source: README.md in this folder derives every form and gives the numbers that the code cites.
    """
    check_degree(degree)
    _check_tensors(q, k, v, log_g)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: found {chunk_size}, wanted at least 1")
    if form not in get_args(Form):
        raise ValueError(f"form: found {form!r}, wanted one of {', '.join(get_args(Form))}")
    offsets = None if cu_seqlens is None else _check_offsets(cu_seqlens, q.shape[0], q.shape[1])
    num_states = q.shape[0] if offsets is None else len(offsets) - 1
    if initial_state is not None:
        _check_state(initial_state, num_states, k.shape[2], q.shape[3], v.shape[3], degree)
    resolved = resolve_backend(backend)
    call = _Call(
        degree=degree,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        normalize=normalize,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
        form="reference" if resolved == "reference" else form,
    )
    # Autocast would turn the matrix products inside into 16-bit ones.
    with torch.autocast(q.device.type, enabled=False):
        if offsets is None:
            return call.one_sequence(q, k, v, log_g, initial_state)
        return call.packed(q, k, v, log_g, initial_state, offsets)


def power_attention_step(
    state: PowerState,
    q: Float[Tensor, "B 1 H K"],
    k: Float[Tensor, "B 1 G K"],
    v: Float[Tensor, "B 1 G V"],
    log_g: Float[Tensor, "B 1 G"] | None = None,
    *,
    degree: int = 2,
    scale: float | None = None,
    normalize: bool = True,
) -> tuple[Float[Tensor, "B 1 H V"], PowerState]:
    """One token of `power_attention`, at a cost that does not depend on the tokens before it.

    Args, Raises: as for `power_attention`, with T = 1. The state given is left as it is.

    Returns:
        The token's output and the state after it.
    """
    check_degree(degree)
    _check_tensors(q, k, v, log_g)
    if q.shape[1] != 1:
        raise ValueError(f"q: found {q.shape[1]} tokens, wanted 1")
    _check_state(state, q.shape[0], k.shape[2], q.shape[3], v.shape[3], degree)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        out, after = recurrent_step(
            PowerState(state.kv.to(dtype), state.norm.to(dtype)),
            q[:, 0].to(dtype),
            k[:, 0].to(dtype),
            v[:, 0].to(dtype),
            None if log_g is None else log_g[:, 0].to(dtype),
            degree=degree,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            normalize=normalize,
        )
    return out[:, None].to(q.dtype), after
