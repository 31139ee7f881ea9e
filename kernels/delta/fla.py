"""The op by flash-linear-attention's kernels, another project's, for a GPU where it is installed.

Signatures are those of fla-core 0.6.0. They take logs of decays, q and k shared by heads of values
or not, states as (K, V), and documents as offsets, as this op does. They read differences of sums
of gates, so that a gate of 0 would be NaN: here one that all heads have begins a document.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._compile import _disable_dynamo

from longhaul.kernels.backend import cannot_run

_IS_INSTALLED = find_spec("fla") is not None
_WIDEST_KEYS = 256
# In float32 some of the kernels refuse to run, and the others multiply in TF32.
_DTYPES = (torch.bfloat16, torch.float16)


def runs_on_fla(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether its kernels are for tensors of this kind, be they installed or not."""
    return device.type == "cuda" and dtype in _DTYPES


def why_unavailable(device: torch.device) -> str | None:
    """Why the package cannot run on tensors of a device; None when it can."""
    if not _IS_INSTALLED:
        return "flash-linear-attention is not installed"
    return None if device.type == "cuda" else f"the tensors are on {device}"


# torch.compiler.disable would import torch._dynamo here, which takes a second. This form, which
# torch itself uses, imports it at the first call.
@_disable_dynamo
def delta_rule_fla(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_g: Float[Tensor, "B T H *channels"] | None,
    initial_state: Float[Tensor, "S H K V"] | None,
    *,
    scale: float,
    output_final_state: bool,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "S H K V"] | None]:
    """`delta_rule` on checked tensors. It waits for the GPU, to see which gates are 0.

    Raises: ValueError for what these kernels cannot do.
    """
    _check(q)
    B, T = q.shape[:2]
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    last = None
    wide = torch.promote_types(q.dtype, torch.float32)
    state = None if initial_state is None else initial_state.to(wide)
    if log_g is not None:
        log_g = log_g.to(wide)
        begins_anew = _begins_anew(log_g)
        if begins_anew.any():
            log_g = log_g.masked_fill(log_g.isneginf(), 0)
            q, k, v, log_g = (x.flatten(0, 1)[None] for x in (q, k, v, log_g))
            beta = None if beta is None else beta.flatten(0, 1)[None]
            if offsets is None:
                offsets = torch.arange(0, B * T + 1, T, device=v.device)
            state, offsets, last = _documents(begins_anew.flatten(), state, offsets)
    with torch.autocast(v.device.type, enabled=False):
        out, after = _call(
            *(q, k, v, beta, log_g),
            scale=float(scale),
            initial_state=state,
            output_final_state=output_final_state,
            cu_seqlens=offsets,
        )
    out = out.view(B, T, *out.shape[2:])
    if not output_final_state:
        return out, None
    return out, after if last is None else after[last]


def _check(q: Tensor) -> None:
    reason = why_unavailable(q.device)
    if reason is None and q.dtype not in _DTYPES:
        reason = f"it has no exact {str(q.dtype).removeprefix('torch.')}"
    if reason is None and q.shape[3] > _WIDEST_KEYS:
        reason = f"keys have a width of {q.shape[3]}, and it has none above {_WIDEST_KEYS}"
    if reason is not None:
        raise cannot_run("fla", reason)


def _begins_anew(log_g: Float[Tensor, "B T H *channels"]) -> Bool[Tensor, "B T"]:
    """The tokens before which everything is forgotten."""
    is_zero = log_g.isneginf().flatten(2)
    forgets = is_zero.all(dim=-1)
    if (is_zero.any(dim=-1) != forgets).any():
        raise cannot_run("fla", "it has no decay of exactly 0 for some heads or channels alone")
    return forgets


def _documents(
    begins_anew: Bool[Tensor, " T"],
    state: Float[Tensor, "S H K V"] | None,
    offsets: Int[Tensor, " S_plus_1"],
) -> tuple[Float[Tensor, "N H K V"] | None, Int[Tensor, " N_plus_1"], Int[Tensor, " S"]]:
    """The parts of S sequences as N: their states, their offsets, and which are the last ones."""
    starts = offsets[:-1]
    begins = begins_anew.index_fill(0, starts, True)
    part = begins.cumsum(0) - 1  # of each token
    ends = offsets[-1:]
    parts = torch.cat([begins.nonzero()[:, 0], ends])
    if state is not None:
        held = state.masked_fill(begins_anew[starts][:, None, None, None], 0)
        state = held.new_zeros(len(parts) - 1, *held.shape[1:]).index_copy(0, part[starts], held)
    return state, parts, part[offsets[1:] - 1]


def _call(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_g: Tensor | None, **how: object
) -> tuple[Tensor, Tensor]:
    """The kernels of this recurrence."""
    per_channel = log_g is not None and log_g.ndim == 4
    shared = v.shape[2] // k.shape[2]
    if beta is not None and log_g is not None:
        name = "kda" if per_channel else "gated_delta_rule"
        result = _function(name)(q, k, v, log_g, beta, **how)
    else:
        # Their kernels have as many heads of keys as of values.
        q, k = (x.repeat_interleave(shared, dim=2) if shared > 1 else x for x in (q, k))
        if beta is not None:
            result = _function("delta_rule")(q, k, v, beta, **how)
        else:
            result = _function("gla" if per_channel else "simple_gla")(q, k, v, log_g, **how)
    return result


def _function(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    # The package takes seconds to import, and is used where it is asked for alone.
    function: Callable[..., tuple[Tensor, Tensor]] = getattr(
        import_module(f"fla.ops.{name}"), f"chunk_{name}"
    )
    return function
