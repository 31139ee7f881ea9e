"""The passes of the torch backend, over groups of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from longhaul.kernels.delta.call import DeltaCall, Forward, Gradients, Inputs
from longhaul.kernels.delta.torch.chunks import Chunks, Loaded
from longhaul.kernels.delta.torch.grid import Group, num_kept, sequences


def forward(call: DeltaCall, inputs: Inputs) -> Forward:
    """Output, final state, and the states for the backward pass."""
    k, v, q, _, _, state, cu_seqlens = inputs
    (B, T, H, V), K = v.shape, k.shape[3]
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    documents = None if cu_seqlens is None else len(cu_seqlens) - 1
    out = None if q is None else q.new_empty(v.shape)
    final = kept = None
    if call.output_final_state:
        final = like.new_empty(B if documents is None else documents, H, K, V)
    if call.keeps_states:
        kept = like.new_empty(num_kept(T, call.chunk_size, H, documents), B, H, K, V)
    for some in sequences(B, T, H, call.chunk_size, cu_seqlens):
        rows = (some.rows.stop - some.rows.start) * H
        at = like.new_zeros(rows, K, V)
        if state is not None:
            at = state[some.states].flatten(0, 1).to(like.dtype)
        for group in some.groups:
            if kept is not None:
                kept[group.kept, group.rows] = at.unflatten(0, (-1, H))
            chunks = _load(call, inputs, group, like.dtype)
            at = chunks.walk(at, keeps_states=out is not None)
            if out is not None:
                group.store(chunks.read(), out)
        if final is not None:
            final[some.states] = at.unflatten(0, (-1, H))
    return Forward(out, final, kept)


def backward(
    call: DeltaCall, inputs: Inputs, kept: Tensor, dout: Tensor | None, dstate: Tensor | None
) -> Gradients:
    """Gradients of all inputs, in their dtypes."""
    k, v, q, beta, log_g, state, cu_seqlens = inputs
    (B, T, H, V), K = v.shape, k.shape[3]
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    # Without a gradient of the output, queries have none either.
    dq = None if q is None else torch.zeros_like(q) if dout is None else torch.empty_like(q)
    dk, dv, dbeta, dlog_g, dinitial = (
        None if x is None else torch.empty_like(x) for x in (k, v, beta, log_g, state)
    )
    assert dk is not None
    assert dv is not None
    for some in sequences(B, T, H, call.chunk_size, cu_seqlens):
        rows = (some.rows.stop - some.rows.start) * H
        at = like.new_zeros(rows, K, V)
        if dstate is not None:
            at = dstate[some.states].flatten(0, 1).to(like.dtype)
        for group in reversed(some.groups):
            chunks = _load(call, inputs, group, like.dtype)
            chunks.walk(kept[group.kept, group.rows].flatten(0, 1), keeps_states=True)
            read = None if dout is None else group.load(dout, like.dtype, H)
            grads, at = chunks.backward(read, at)
            if dq is not None and grads.q is not None:
                group.store(grads.q.mul_(call.scale), dq)
            group.store(grads.k, dk)
            group.store(grads.v, dv)
            if dbeta is not None and grads.beta is not None:
                group.store(grads.beta, dbeta[..., None])
            if dlog_g is not None:
                group.store(grads.log_g, _with_channels(dlog_g))
        if dinitial is not None:
            dinitial[some.states] = at.unflatten(0, (-1, H)).to(dinitial.dtype)
    return Gradients(dk, dv, dq, dbeta, dlog_g, dinitial)


def _load(call: DeltaCall, inputs: Inputs, group: Group, dtype: torch.dtype) -> Chunks:
    k, v, q, beta, log_g, *_ = inputs
    H = v.shape[2]
    k_chunks = group.load(k, dtype, H)
    loaded = Loaded(
        k_chunks,
        group.load(v, dtype, H),
        None if q is None else call.scale * group.load(q, dtype, H),
        None if beta is None else group.load(beta[..., None], dtype, H),
        k_chunks.new_zeros(*k_chunks.shape[:2], 1)
        if log_g is None
        else group.load(_with_channels(log_g), dtype, H),
    )
    return Chunks(loaded, group.chunks)


def _with_channels(log_g: Tensor) -> Tensor:
    """Gates as (B, T, H, D), where D = 1 if there is one for all channels; a view."""
    return log_g[..., None] if log_g.ndim == 3 else log_g
