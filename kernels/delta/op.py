"""The public functions: they check arguments, choose form and backend, and run the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.kernels.backend import (
    Backend,
    cannot_run,
    resolve_backend,
    triton_unless,
    why_dtype_unsupported,
)
from longhaul.kernels.common.arguments import check_chunk_size, check_flags, check_scale
from longhaul.kernels.common.offsets import check_offsets, check_packing, has_values
from longhaul.kernels.delta import library
from longhaul.kernels.delta.call import DeltaCall, Inputs
from longhaul.kernels.delta.checks import check_state, check_tensors
from longhaul.kernels.delta.cost import choose_chunk_size
from longhaul.kernels.delta.fla import delta_rule_fla
from longhaul.kernels.delta.reference import delta_rule_reference
from longhaul.kernels.delta.torch import delta_rule_recurrent, step

Form = Literal["auto", "chunked", "recurrent"]
DeltaBackend = Backend | Literal["fla"]


def delta_rule(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_g: Float[Tensor, "B T H *channels"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "S H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int | None = None,
    form: Form = "auto",
    backend: DeltaBackend = "auto",
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "S H K V"] | None]:
    """Reads of a state that is decayed, erased along each key, and written: scale S_tᵀ q_t.

        S_t = Diag(e^{g_t}) S_{t−1} + β_t k_t (v_t − (Diag(e^{g_t}) S_{t−1})ᵀ k_t)ᵀ

    Args:
        q, k: queries and keys. Any float dtype; float64 is computed in float64, all others in
            float32. Triton's kernels multiply bfloat16 or TF32, and round what they leave to each
            other (README.md, section 7). For β up to 2 the norm of a key must be at most 1, or
            states can explode.
        v: values in the dtype of q; G divides H, so consecutive heads of values share keys.
        beta: strength of erasing and writing, usually in [0, 2], in any float dtype. None means
            that nothing is erased: S_t = Diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, gated linear attention.
        log_g: log of the decay, ≤ 0, per token and head, (B, T, H), or per key channel too,
            (B, T, H, K); −inf forgets everything before the token. None means no decay. It must be
            float32 or float64, also under autocast.
        scale: factor on the output. None means K^(−1/2).
        initial_state: state that an earlier call returned; (B, …), or (N, …) if packed.
        output_final_state: return the state after the last token (of every document), in float32
            (float64 for float64 inputs).
        cu_seqlens: N + 1 ascending offsets, from 0 to T, of documents packed along T (B must be
            1); no document is empty. None means that each row of the batch is one document.
        chunk_size: tokens per chunk of the chunked form, a power of two; None chooses it. It
            changes speed and memory, and of the result its rounding.
        form: "chunked", "recurrent" (one token at a time) or "auto", which is "chunked". Results
            agree up to rounding.
        backend: "reference" (the recurrence, which ignores `form`), "torch", "triton", "auto", or
            "fla": the chunked form in 16 bits by flash-linear-attention's kernels, on a GPU where
            that package is installed. It ignores `chunk_size`, and needs the GPU's answer about
            which gates are 0.

    Returns:
        The output in the dtype of q, and the state or None. Both have gradients once. Second
        derivatives need backend="reference" or form="recurrent".

    Raises:
        ValueError: naming the argument, the value found and the value wanted.

    Source: README.md in this folder derives every form; the code cites its equation numbers.
    """
    check_tensors(q, k, v, beta, log_g)
    _check_chunk_size(chunk_size)
    check_scale(scale)
    check_flags(output_final_state=output_final_state)
    if form not in get_args(Form):
        raise ValueError(f"form: found {form!r}, wanted one of {', '.join(get_args(Form))}")
    B, T, _, K = q.shape
    H, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if cu_seqlens is not None:
        check_packing(cu_seqlens, q)
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_state("initial_state", initial_state, S, H, K, V)
    if backend == "fla":
        if form == "recurrent":
            raise cannot_run(backend, "it has the chunked form alone")
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, T)
        results: tuple[Tensor, Tensor | None] = delta_rule_fla(
            *(q, k, v, beta, log_g, initial_state),
            scale=scale,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )
        return results
    resolved = resolve_backend(backend, q.device, "fla")
    if resolved == "reference" or form == "recurrent":
        one = delta_rule_reference if resolved == "reference" else delta_rule_recurrent
        offsets = None if cu_seqlens is None else check_offsets(cu_seqlens, T)
        # Autocast would compute the matrix products in 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            out, after = _per_document(
                partial(one, scale=scale), (q, k, v, beta, log_g), initial_state, offsets
            )
        return out, after if output_final_state else None
    if cu_seqlens is not None and has_values(cu_seqlens):
        check_offsets(cu_seqlens, T)
    runs_on = _chunked_backend(backend, k, chunk_size)
    call = DeltaCall(
        scale=scale,
        chunk_size=chunk_size or choose_chunk_size(T, runs_on),
        output_final_state=output_final_state,
        keeps_states=_any_needs_gradient(q, k, v, beta, log_g, initial_state),
    )
    return library.run(call, Inputs(k, v, q, beta, log_g, initial_state, cu_seqlens), runs_on)


def delta_rule_step(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B 1 G K"],
    k: Float[Tensor, "B 1 G K"],
    v: Float[Tensor, "B 1 H V"],
    beta: Float[Tensor, "B 1 H"] | None,
    log_g: Float[Tensor, "B 1 H *channels"] | None = None,
    *,
    scale: float | None = None,
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B 1 H V"], Float[Tensor, "B H K V"]]:
    """One token of `delta_rule`, at a cost that does not depend on the tokens before it.

    Args, Raises: as for `delta_rule`, with T = 1, and
        inplace: overwrite `state` and return it; then no tensor may require a gradient.
            Otherwise `state` is left unchanged.

    Returns:
        The output for the token, and the state after it.
    """
    check_tensors(q, k, v, beta, log_g)
    check_scale(scale)
    check_flags(inplace=inplace)
    if q.shape[1] != 1:
        raise ValueError(f"q: found {q.shape[1]} tokens, wanted 1")
    H, V = v.shape[2:]
    check_state("state", state, q.shape[0], H, q.shape[3], V)
    if inplace and _any_needs_gradient(state, q, k, v, beta, log_g):
        raise ValueError("inplace: found tensors that need a gradient, wanted torch.no_grad()")
    resolved = resolve_backend(backend, q.device)
    if backend == "triton":
        raise cannot_run(backend, "there is no kernel for one token of the delta rule")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        if resolved == "reference":
            out, after = delta_rule_reference(q, k, v, beta, log_g, state, scale=scale)
        else:
            now = (x[:, 0].to(dtype) for x in (q, k, v))
            gates = (None if x is None else x[:, 0].to(dtype) for x in (beta, log_g))
            out, after = step(state.to(dtype), *now, *gates, scale=scale, inplace=inplace)
            out = out[:, None].to(q.dtype)
    if inplace and after is not state:
        after = state.copy_(after)
    return out, after


def state_alone(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_g: Tensor | None,
    state: Tensor,
    *,
    chunk_size: int | None,
    backend: Backend,
) -> Tensor:
    """The final state of `delta_rule` on checked tensors, without reading it for any token."""
    _check_chunk_size(chunk_size)
    if resolve_backend(backend, k.device) == "reference":
        with torch.autocast(k.device.type, enabled=False):
            # A state does not depend on queries.
            return delta_rule_reference(k, k, v, beta, log_g, state, scale=1.0)[1]
    runs_on = _chunked_backend(backend, k, chunk_size)
    call = DeltaCall(
        scale=1.0,
        chunk_size=chunk_size or choose_chunk_size(k.shape[1], runs_on),
        output_final_state=True,
        keeps_states=_any_needs_gradient(k, v, beta, log_g, state),
    )
    _, after = library.run(call, Inputs(k, v, None, beta, log_g, state, None), runs_on)
    assert after is not None
    return after


def _check_chunk_size(chunk_size: int | None) -> None:
    check_chunk_size(chunk_size)
    if chunk_size is not None and chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: found {chunk_size}, wanted a power of two")


def _chunked_backend(
    backend: Backend, k: Tensor, chunk_size: int | None
) -> Literal["torch", "triton"]:
    """The backend of the chunked form; "auto" takes Triton for bfloat16 alone.

    Its kernels multiply other dtypes in TF32, float32 in three parts, where they spill registers.
    """
    if resolve_backend(backend, k.device) != "triton":
        return "torch"
    if backend == "auto" and k.dtype != torch.bfloat16:
        return "torch"
    reason = why_dtype_unsupported(k.dtype)
    if reason is None:
        # Triton takes long to import, and may not be installed.
        from longhaul.kernels.delta import triton

        reason = triton.why_not(k.shape[3], chunk_size)
    return triton_unless("the delta rule", backend, reason)


def _per_document(
    one: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor | None, ...],
    state: Tensor | None,
    offsets: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """Run packed documents one by one, each with its own state, so that nothing leaks."""
    if offsets is None:
        return one(*tensors, state)
    lengths = [end - start for start, end in pairwise(offsets)]
    # A split has one backward for all parts; N slices would each allocate a gradient of full size.
    parts = [
        [None] * len(lengths) if x is None else torch.split(x, lengths, dim=1) for x in tensors
    ]
    states = [None] * len(lengths) if state is None else torch.split(state, 1)
    results = [one(*document) for document in zip(*parts, states, strict=True)]
    outs, after = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(after)


def _any_needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
