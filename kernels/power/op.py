"""The public functions: they check arguments, choose form and backend, and run the call."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.kernels.backend import (
    Backend,
    resolve_backend,
    triton_unless,
    why_dtype_unsupported,
)
from longhaul.kernels.common.arguments import check_chunk_size, check_flags, check_scale
from longhaul.kernels.common.offsets import check_offsets, check_packing, has_values
from longhaul.kernels.power import library, recurrent
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.checks import check_keys, check_state, check_tensors
from longhaul.kernels.power.cost import (
    Form,
    choose_chunk_size,
    choose_form,
    keeps_states,
    num_chunks,
)
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.shapes import check_degree

_OP = "power attention"


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
        q: queries. Any float dtype; float64 is computed in float64, all others in float32.
        k, v: keys and values in the dtype of q; G divides H, as in grouped-query attention.
        log_g: log of the decay per token and key head, ≤ 0; −inf forgets everything before the
            token. None means no decay. G_t is its running sum. It must be float32 or float64,
            also under autocast, where a projection x W gives 16 bits: take
            `F.logsigmoid((x W).float())`. q, k and v may be in any floating-point dtype there.
        degree: 1 or an even integer. The state has about K^degree / degree! rows.
        scale: factor on q·k before the power. None means K^(−1/2).
        normalize: divide by the sum of the weights. A sum below 1e-30 counts as 1e-30. Degrees
            above 4 have no such floor where no state is read, which includes form="auto" without an
            initial state: there the size of scores, from 1e-25 to 1e24, changes nothing.
        initial_state: state that an earlier call returned; (B, …), or (N, …) if packed.
        output_final_state: return the state after the last token (of every document).
        cu_seqlens: N + 1 ascending offsets, from 0 to T, of documents packed along T (B must be
            1); no document is empty. None means that each row of the batch is one document.
        chunk_size: tokens per chunk of the chunked form; None chooses it by cost. It changes
            speed and memory, and of the result its rounding.
        form: "attention" (quadratic), "chunked" (linear), "recurrent" (one token at a time) or
            "auto" (by cost). Results agree up to rounding. Above degree 4, forms that read a
            state have limits: docs/kernels.md, "Small weights in a state".
        backend: "reference" (the formula, quadratic, ignores `form`), "torch", "triton", "auto".

    Returns:
        Weighted mean (or sum) of v over the past in the dtype of q, and the state or None. Both
        have gradients once. Second derivatives need backend="reference" or form="recurrent"; the
        other forms refuse them with a RuntimeError.

    Raises:
        ValueError: naming the argument, the value found and the value wanted.

    Cost: O(T · C · K + T · P · V) time in the chunked form, O(T) memory; see cost.py.
    Source: README.md in this folder derives every form; the code cites its equation numbers.
    """
    check_degree(degree)
    check_tensors(q, k, v, log_g)
    check_chunk_size(chunk_size)
    check_scale(scale)
    check_flags(normalize=normalize, output_final_state=output_final_state)
    if form not in get_args(Form):
        raise ValueError(f"form: found {form!r}, wanted one of {', '.join(get_args(Form))}")
    B, T, _, K = q.shape
    G, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if cu_seqlens is not None:
        check_packing(cu_seqlens, q)
    resolved = resolve_backend(backend, q.device)
    if initial_state is not None:
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state(initial_state, S, G, K, V, degree)
    kv, norm = (None, None) if initial_state is None else initial_state
    if resolved == "reference" or form == "recurrent":
        offsets = None if cu_seqlens is None else check_offsets(cu_seqlens, T)
        if resolved == "triton":
            resolved = _backend_for_step(backend, degree, q, k, v, log_g, kv, norm)
        one: recurrent.Form = partial(
            recurrent.FORMS[resolved], degree=degree, scale=scale, normalize=normalize
        )
        # Autocast would compute the matrix products in 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            out, after = recurrent.per_document(one, q, k, v, log_g, initial_state, offsets)
        return out, after if output_final_state else None

    longest = T if cu_seqlens is None else _longest(cu_seqlens, T)
    if form == "auto":
        form = choose_form(longest, K, V, degree, resolved)
    if form == "attention":
        chunk_size = longest
    elif chunk_size is None:
        chunk_size = choose_chunk_size(longest, K, V, degree, resolved)
    call = PowerCall(
        degree=degree,
        scale=scale,
        normalize=normalize,
        output_final_state=output_final_state,
        form=form,
        chunk_size=chunk_size,
        # A single chunk needs no state.
        keeps_states=form == "chunked"
        and chunk_size < T
        and _needs_gradient(q, k, v, log_g, kv, norm)
        and _keeps_states(q, V, degree, chunk_size, cu_seqlens),
    )
    if resolved == "triton":
        resolved = _backend_for_call(backend, call, q, v, has_state=initial_state is not None)
    out, kv, norm = library.run(call, q, k, v, log_g, kv, norm, cu_seqlens, backend=resolved)
    return out, None if kv is None or norm is None else PowerState(kv, norm)


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
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B 1 H V"], PowerState]:
    """One token of `power_attention`, at a cost that does not depend on the tokens before it.

    A state from `PowerState.to_bfloat16` keeps kv in bfloat16: sums are computed in float32 and
    rounded at random. docs/kernels.md has the error after 65,536 tokens.

    Args, Raises: as for `power_attention`, with T = 1, and
        inplace: overwrite `state` and return it; then no tensor may require a gradient.
            Otherwise `state` is left unchanged.

    Returns:
        The output for the token, and the state after it.
    """
    check_degree(degree)
    check_tensors(q, k, v, log_g)
    check_scale(scale)
    check_flags(normalize=normalize, inplace=inplace)
    if q.shape[1] != 1:
        raise ValueError(f"q: found {q.shape[1]} tokens, wanted 1")
    check_state(state, q.shape[0], k.shape[2], q.shape[3], v.shape[3], degree)
    if inplace and (any(x.requires_grad for x in state) or _needs_gradient(q, k, v, log_g)):
        raise ValueError("inplace: found tensors that need a gradient, wanted torch.no_grad()")
    if state.kv.dtype == torch.bfloat16 and _needs_gradient(q, k, v, log_g, *state):
        raise ValueError(
            "state.kv: found bfloat16 and tensors that need a gradient, wanted float32 or "
            "torch.no_grad()"
        )
    if state.kv.dtype == torch.bfloat16 and state.norm.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(f"state.norm: found {state.norm.dtype}, wanted float32 beside bfloat16 kv")
    resolved = resolve_backend(backend, q.device)
    if resolved == "triton":
        resolved = _backend_for_step(backend, degree, q, k, v, log_g, *state)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        return recurrent.step(
            resolved, state, q, k, v, log_g,
            degree=degree, scale=scale, normalize=normalize, inplace=inplace,
        )  # fmt: skip


def power_state(
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None = None,
    *,
    degree: int = 2,
    initial_state: PowerState | None = None,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> PowerState:
    """The state that `power_attention` leaves after the last token (of every document).

    It takes one of the op's two products with the state, and none inside chunks: no state is read
    and no pair of tokens is scored.

    Args, Raises: as for `power_attention`. A state depends neither on scale nor on normalisation.
    """
    check_degree(degree)
    check_keys(k, v, log_g)
    check_chunk_size(chunk_size)
    B, T, G, K = k.shape
    V = v.shape[3]
    if cu_seqlens is not None:
        check_packing(cu_seqlens, k)
    resolved = resolve_backend(backend, k.device)
    if initial_state is not None:
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state(initial_state, S, G, K, V, degree)
    if resolved == "reference":
        offsets = None if cu_seqlens is None else check_offsets(cu_seqlens, T)
        one: recurrent.Form = partial(
            recurrent.FORMS[resolved], degree=degree, scale=1.0, normalize=False
        )
        with torch.autocast(k.device.type, enabled=False):
            # A state does not depend on queries.
            return recurrent.per_document(one, k, k, v, log_g, initial_state, offsets)[1]
    longest = T if cu_seqlens is None else _longest(cu_seqlens, T)
    call = library.state_call(
        degree, chunk_size or choose_chunk_size(longest, K, V, degree, resolved)
    )
    if resolved == "triton":
        resolved = _backend_for_call(backend, call, k, v, has_state=True)
    kv, norm = (None, None) if initial_state is None else initial_state
    inputs = (k, v, log_g, kv, norm, cu_seqlens)
    settings = {"degree": degree, "chunk_size": call.chunk_size, "backend": resolved}
    return PowerState(*library.power_state(*inputs, **settings))


def _longest(cu_seqlens: Tensor, T: int) -> int:
    """Tokens of the longest document, which decides the form; T if the offsets have no values."""
    if not has_values(cu_seqlens):
        return T
    return max(end - start for start, end in pairwise(check_offsets(cu_seqlens, T)))


def _keeps_states(
    q: Tensor, V: int, degree: int, chunk_size: int, cu_seqlens: Tensor | None
) -> bool:
    B, T, _, K = q.shape
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = num_chunks(B, T, chunk_size, documents)
    state_bytes = 2 if q.dtype == torch.bfloat16 else 4
    return keeps_states(
        B * T, chunks, K, V, degree, token_bytes=q.itemsize, state_bytes=state_bytes
    )


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _backend_for_step(
    backend: Backend, degree: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
) -> Literal["torch", "triton"]:
    """The backend of a step on a device where Triton runs."""
    if _needs_gradient(q, k, v, *others):
        return triton_unless(_OP, backend, "its kernel for one token has no backward")
    one_token = PowerCall(
        degree=degree, scale=1.0, normalize=True, output_final_state=True,
        form="chunked", chunk_size=1,
    )  # fmt: skip
    return _backend_for_call(backend, one_token, q, v, has_state=True)


def _backend_for_call(
    backend: Backend, call: PowerCall, q: Tensor, v: Tensor, *, has_state: bool
) -> Literal["torch", "triton"]:
    """The backend of a call on a device where Triton runs."""
    if reason := why_dtype_unsupported(q.dtype):
        return triton_unless(_OP, backend, reason)
    # Triton takes long to import, and may not be installed.
    from longhaul.kernels.power import triton

    return triton_unless(_OP, backend, triton.why_not(call, q.shape[3], v.shape[3], has_state))
