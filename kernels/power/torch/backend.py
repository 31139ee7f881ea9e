"""The passes of the torch backend. The attention form is the chunked form with a single chunk, or
one call of C++.

Packed documents run one by one, each writing its slice of the results, so that nothing leaks. The
passes over one document, or over whole rows of the batch, are in chunked/.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from longhaul.kernels.power.call import Forward, Grads, PowerCall, Saved, SavedState, StateGrads
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.torch import attention_form
from longhaul.kernels.power.torch.chunked.backward import BackwardPass, Gradients
from longhaul.kernels.power.torch.chunked.final_state import StateGradients, StatePass
from longhaul.kernels.power.torch.chunked.forward import ForwardPass
from longhaul.kernels.power.torch.step import recurrent_step
from longhaul.kernels.shapes import state_features


def forward(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Forward:
    """Output, final state, and the denominators for the backward pass."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    final_kv = final_norm = inverse = is_live = None
    if call.output_final_state:
        S, P = (B if cu_seqlens is None else len(cu_seqlens) - 1), state_features(K, call.degree)
        final_kv = q.new_empty(S, G, P, V, dtype=acc_dtype)
        final_norm = q.new_empty(S, G, P, dtype=acc_dtype)
    if call.normalize:
        inverse = q.new_empty(B, T, H, dtype=acc_dtype)
        is_live = q.new_empty(B, T, H, dtype=torch.bool)
    results = Forward(q.new_empty(B, T, H, V), final_kv, final_norm, inverse, is_live)
    if cu_seqlens is None:
        _run_forward(call, q, k, v, log_g, kv, norm, results)
        return results
    for tokens, state in _documents(cu_seqlens):
        into = Forward(
            results.out[tokens],
            _part(final_kv, state),
            _part(final_norm, state),
            _part(inverse, tokens),
            _part(is_live, tokens),
        )
        document = q[tokens], k[tokens], v[tokens], _part(log_g, tokens)
        _run_forward(call, *document, _part(kv, state), _part(norm, state), into)
    return results


def backward(
    call: PowerCall,
    saved: Saved,
    dout: Tensor | None,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    needs: tuple[bool, bool, bool, bool, bool, bool],
) -> Grads:
    """Gradients of q, k, v, log_g, kv and norm; None where not needed."""
    q, k, v = saved.q, saved.k, saved.v
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    dlog_g = dinitial_kv = dinitial_norm = None
    if saved.log_g is not None and needs[3]:
        dlog_g = saved.log_g.new_empty(saved.log_g.shape)
    if saved.kv is not None and saved.norm is not None and (needs[4] or needs[5]):
        dinitial_kv = saved.kv.new_empty(saved.kv.shape)
        dinitial_norm = saved.norm.new_empty(saved.norm.shape)
    dq, dk, dv = (x.new_empty(x.shape, dtype=acc_dtype) for x in (q, k, v))
    grads = Gradients(dq, dk, dv, dlog_g, dinitial_kv, dinitial_norm)
    if saved.cu_seqlens is None:
        _run_backward(call, saved, dout, dkv, dnorm, grads)
    else:
        for tokens, state in _documents(saved.cu_seqlens):
            _run_backward(
                call,
                _document(saved, tokens, state),
                _part(dout, tokens),
                _part(dkv, state),
                _part(dnorm, state),
                Gradients(
                    dq[tokens],
                    dk[tokens],
                    dv[tokens],
                    _part(dlog_g, tokens),
                    _part(dinitial_kv, state),
                    _part(dinitial_norm, state),
                ),
            )
    return (
        dq.to(q.dtype) if needs[0] else None,
        dk.to(k.dtype) if needs[1] else None,
        dv.to(v.dtype) if needs[2] else None,
        dlog_g,
        dinitial_kv if needs[4] else None,
        dinitial_norm if needs[5] else None,
    )


def _run_forward(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    into: Forward,
) -> None:
    if kv is None and norm is None and attention_form.serves(call, q, k, v):
        attention_form.forward(call, q, k, v, log_g, into)
    else:
        ForwardPass(call, q, k, v, log_g, into).run(kv, norm)


def _run_backward(
    call: PowerCall,
    saved: Saved,
    dout: Tensor | None,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    into: Gradients,
) -> None:
    has_state = saved.kv is not None or saved.norm is not None
    if not has_state and attention_form.serves(call, saved.q, saved.k, saved.v, dout):
        attention_form.backward(call, saved, dout, into)
    else:
        BackwardPass(call, saved, dout, dkv, dnorm, into).run()


def state_forward(
    call: PowerCall,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> PowerState:
    """The final state alone."""
    B, _, G, K = k.shape
    S, P = (B if cu_seqlens is None else len(cu_seqlens) - 1), state_features(K, call.degree)
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    final = PowerState(like.new_empty(S, G, P, v.shape[3]), like.new_empty(S, G, P))
    for tokens, state in _sequences(cu_seqlens):
        sequence = StatePass(call, k[tokens], v[tokens], _part(log_g, tokens))
        into = PowerState(final.kv[state], final.norm[state])
        sequence.forward(_part(kv, state), _part(norm, state), into)
    return final


def state_backward(
    call: PowerCall, saved: SavedState, dkv: Tensor | None, dnorm: Tensor | None
) -> StateGrads:
    """Gradients of k, v, log_g, kv and norm; None for absent inputs."""
    k, v, log_g = saved.k, saved.v, saved.log_g
    acc_dtype = torch.promote_types(k.dtype, torch.float32)
    dk, dv = (x.new_empty(x.shape, dtype=acc_dtype) for x in (k, v))
    dlog_g, dinitial_kv, dinitial_norm = (
        None if x is None else x.new_empty(x.shape) for x in (log_g, saved.kv, saved.norm)
    )
    for tokens, state in _sequences(saved.cu_seqlens):
        into = StateGradients(
            dk[tokens],
            dv[tokens],
            _part(dlog_g, tokens),
            _part(dinitial_kv, state),
            _part(dinitial_norm, state),
        )
        final = PowerState(saved.final_kv[state], saved.final_norm[state])
        sequence = StatePass(call, k[tokens], v[tokens], _part(log_g, tokens))
        sequence.backward(_part(dkv, state), _part(dnorm, state), final, into)
    return dk.to(k.dtype), dv.to(v.dtype), dlog_g, dinitial_kv, dinitial_norm


def step(
    state: PowerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    inplace: bool,
) -> tuple[Tensor, PowerState]:
    """One token, q (B, 1, H, K), and the state after it, which is `state` itself if in place."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, after = recurrent_step(
        state,
        q[:, 0].to(dtype),
        k[:, 0].to(dtype),
        v[:, 0].to(dtype),
        None if log_g is None else log_g[:, 0].to(dtype),
        degree=degree,
        scale=scale,
        normalize=normalize,
        inplace=inplace,
    )
    return out[:, None].to(q.dtype), after


_Index = tuple[slice, ...]


def _sequences(cu_seqlens: Tensor | None) -> list[tuple[_Index, _Index]]:
    """Index of the tokens and of the state: all rows at once, or each packed document."""
    everything = (slice(None), slice(None)), (slice(None),)
    return [everything] if cu_seqlens is None else _documents(cu_seqlens)


def _documents(cu_seqlens: Tensor) -> list[tuple[_Index, _Index]]:
    """Index of the tokens and of the state of every document."""
    edges = pairwise(cu_seqlens.tolist())
    return [
        ((slice(None), slice(start, end)), (slice(n, n + 1),))
        for n, (start, end) in enumerate(edges)
    ]


def _part(x: Tensor | None, at: _Index) -> Tensor | None:
    return None if x is None else x[at]


def _document(saved: Saved, tokens: _Index, state: _Index) -> Saved:
    return Saved(
        q=saved.q[tokens],
        k=saved.k[tokens],
        v=saved.v[tokens],
        log_g=_part(saved.log_g, tokens),
        kv=_part(saved.kv, state),
        norm=_part(saved.norm, state),
        cu_seqlens=None,
        out=saved.out[tokens],
        final_kv=_part(saved.final_kv, state),
        final_norm=_part(saved.final_norm, state),
        inverse=_part(saved.inverse, tokens),
        is_live=_part(saved.is_live, tokens),
    )
