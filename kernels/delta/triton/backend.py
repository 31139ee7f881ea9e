"""The passes of the Triton backend, and the calls that it does not support."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, cut
from longhaul.kernels.delta.call import DeltaCall, Forward, Gradients, Inputs
from longhaul.kernels.delta.triton.gradients import token_gradients
from longhaul.kernels.delta.triton.prepare import prepare
from longhaul.kernels.delta.triton.read import read
from longhaul.kernels.delta.triton.shapes import Shapes, shapes_of
from longhaul.kernels.delta.triton.walk import walk, walk_back

_WIDEST_KEY = 256
_LONGEST_CHUNK = 64


def why_not(K: int, chunk_size: int | None) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if K > _WIDEST_KEY:
        return f"its kernels take K up to {_WIDEST_KEY}, found {K}"
    if chunk_size is not None and chunk_size > _LONGEST_CHUNK:
        return f"its kernels take chunks of up to {_LONGEST_CHUNK} tokens, found {chunk_size}"
    return None


def forward(call: DeltaCall, inputs: Inputs) -> Forward:
    """Output and final state; nothing is kept for the backward pass, which walks again."""
    with _on(inputs.k.device):
        given, shapes, chunks = _prepared(call, inputs)
        k, v, q, beta, log_g, state, _ = given
        assert log_g is not None
        prepared = prepare(shapes, chunks, q, k, v, beta, log_g, call.scale, goes_back=False)
        walked = walk(shapes, chunks, v, prepared, state, keeps=q is not None)
        out = None
        if q is not None:
            assert prepared.p is not None
            assert prepared.q_start is not None
            assert walked.states is not None
            assert walked.new is not None
            out = read(shapes, chunks, q, prepared.q_start, prepared.p, walked.states, walked.new)
        return Forward(out, walked.final if call.output_final_state else None, None)


def backward(
    call: DeltaCall, inputs: Inputs, kept: Tensor, dout: Tensor | None, dstate: Tensor | None
) -> Gradients:
    """Gradients of all inputs."""
    with _on(inputs.k.device):
        given, shapes, chunks = _prepared(call, inputs)
        k, v, q, beta, log_g, state, _ = given
        assert log_g is not None
        dout = None if dout is None else dout.contiguous()
        dstate = None if dstate is None else dstate.contiguous()
        queries = None if dout is None else q
        prepared = prepare(shapes, chunks, queries, k, v, beta, log_g, call.scale, goes_back=True)
        walked = walk(shapes, chunks, v, prepared, state, keeps=True)
        back = walk_back(shapes, chunks, v, prepared, dout, dstate)
        dk, dv, dq, dbeta, dlog_g, dinitial = token_gradients(
            shapes, chunks, queries, k, v, beta, log_g, prepared, walked, back, dout, call.scale
        )
        if dq is None and q is not None:
            dq = torch.zeros_like(dk)
        G = k.shape[2]
        return Gradients(
            _of_key_heads(dk, G),
            dv,
            None if dq is None else _of_key_heads(dq, G),
            dbeta,
            None if inputs.log_g is None else dlog_g,
            None if state is None else dinitial,
        )


def _of_key_heads(x: Tensor, G: int) -> Tensor:
    """(B, T, H, K) of heads of values, summed over those that share a key head."""
    H = x.shape[2]
    return x if H == G else x.unflatten(2, (G, H // G)).sum(dim=3)


def _prepared(call: DeltaCall, inputs: Inputs) -> tuple[Inputs, Shapes, Chunks]:
    """The inputs as kernels read them: contiguous, and with gates of 1 where there are none."""
    B, T, H, _ = inputs.v.shape
    given = Inputs(*(None if x is None else x.contiguous() for x in inputs))  # type: ignore[arg-type]
    if given.log_g is None:
        given = given._replace(log_g=given.k.new_zeros(B, T, H, dtype=torch.float32))
    assert given.log_g is not None
    shapes = shapes_of(given.k, given.log_g, call.chunk_size)
    # Not at call.chunk_size: blocks of fewer than 16 tokens cannot be multiplied.
    chunks = cut(B, T, shapes.meta["BLOCK_C"], inputs.cu_seqlens, given.k.device)
    return given, shapes, chunks


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, as Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
