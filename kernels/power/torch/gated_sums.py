"""Several gated sums over the same scores, added up, without states: one call of C++ each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longhaul.kernels import native
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.cost import attention_cost, choose_chunk_size, chunked_cost
from longhaul.kernels.power.torch.attention_form import call_compiled
from longhaul.kernels.power.torch.chunking import CallSizes, log2_sums
from longhaul.kernels.power.torch.compiled import attends
from longhaul.kernels.power.torch.gates import gate_gradient


def serves_sums(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    *scales: Tensor,
    num_sums: int,
    degree: int,
) -> bool:
    """Whether `add_gated_sums` serves a call with so many sums and these scales, and costs less
    than the chunked form for each of them. It runs on at most B G threads."""
    if torch.compiler.is_compiling() or not native.serves(q, k, v, *scales):
        return False
    T, K, V = q.shape[1], q.shape[3], v.shape[3]
    if not attends(degree, q) or not (q.numel() and v.numel()):
        return False
    chunked = chunked_cost(T, K, V, degree, choose_chunk_size(T, K, V, degree), "torch")
    return attention_cost(T, K, V, "torch", sums=num_sums) < num_sums * chunked


def add_gated_sums(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G S"],
    value_scale: Float[Tensor, "B T G S"],
    output_scale: Float[Tensor, "B T H S"],
    *,
    degree: int,
    scale: float,
) -> Float[Tensor, "B T H V"]:
    """Σ_n output_scale_tn Σ_i exp(G_tn − G_in) (scale q_t·k_i)^degree value_scale_in v_i.

    G is the running sum of log_g. All tensors are float32, on a CPU, where `serves_sums`. The
    result has gradients once.
    """
    call = PowerCall(
        degree=degree, scale=scale, normalize=False, output_final_state=False,
        form="attention", chunk_size=q.shape[1],
    )  # fmt: skip
    run: Callable[..., Tensor] = _GatedSums.apply
    return run(call, q, k, v, log_g, value_scale, output_scale)


class _GatedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: PowerCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor,
        value_scale: Tensor,
        output_scale: Tensor,
    ) -> Tensor:
        # Saved: inputs. Recomputed: scores and decays.
        ctx.save_for_backward(q, k, v, log_g, value_scale, output_scale)
        ctx.problem = problem = CallSizes.of(call, q, v)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        inputs = [q, k, v, _log_decay(log_g, problem), value_scale, output_scale]
        call_compiled("gated_sums", problem, inputs, [out], num_sums=log_g.shape[3])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_g, value_scale, output_scale = ctx.saved_tensors
        problem = ctx.problem
        inputs = [q, k, v, _log_decay(log_g, problem), value_scale, output_scale, dout]
        dq, dk, dv, dvalue_scale, doutput_scale = outputs = [
            x.new_empty(x.shape) for x in (q, k, v, value_scale, output_scale)
        ]
        call_compiled("gated_sums_backward", problem, inputs, outputs, num_sums=log_g.shape[3])
        # Eq. (15): the sums of w dw over keys and over queries are homogeneous in the scales.
        rows = (output_scale * doutput_scale).double().unflatten(2, (problem.G, -1)).sum(dim=3)
        dlog_g = gate_gradient(
            log_g.flatten(2), rows.flatten(2), (value_scale * dvalue_scale).flatten(2), 1, ()
        )
        dlog_g = dlog_g.to(log_g.dtype).view_as(log_g)
        return None, dq, dk, dv, dlog_g, dvalue_scale, doutput_scale


def _log_decay(log_g: Tensor, problem: CallSizes) -> Tensor:
    """Running sums of log2 γ, (1, B, G S, tokens) in float64."""
    return log2_sums(log_g.flatten(2), problem, torch.float32).contiguous()
