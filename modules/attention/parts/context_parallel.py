"""Power attention under context parallelism: one part of a sequence, given the earlier parts."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels import PowerState, power_attention, power_state
from longhaul.modules.sequence_part import SequencePart


class PowerOptions(NamedTuple):
    """The arguments of `power_attention` of these names, as a variant chooses them."""

    degree: int
    scale: float | None
    normalize: bool
    chunk_size: int | None


def context_parallel_attention(
    part: SequencePart,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_g: Float[Tensor, "B T H"] | None,
    start: PowerState | None,
    options: PowerOptions,
) -> Float[Tensor, "B T H V"]:
    """The output for the tokens of this part.

    `start` is the state at the beginning of every sequence, None where that is zero. Documents
    within a sequence are separated by gates of zero.
    """
    state = _state_before(part, k, v, log_g, start, options)
    mixed, _ = power_attention(q, k, v, log_g, initial_state=state, **options._asdict())
    return mixed


def _state_before(
    part: SequencePart,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    start: PowerState | None,
    options: PowerOptions,
) -> PowerState:
    """The state before the first token of this part.

    Let S be the state at the beginning of the sequence, S_j the state that the tokens of part j
    leave when they start from zero, and D_j the sum of their log gates. The state before part r is

        exp(D_0 + ... + D_(r-1)) S + sum_(j < r) exp(D_(j+1) + ... + D_(r-1)) S_j

    Only S_j and D_j are exchanged between ranks. S is added here instead of to S_0, so that every
    rank computes the same graph, whichever parameters are frozen and wherever documents begin: the
    collectives of the backward pass need that. For the same reason nothing is detached.
    """
    own = power_state(k, v, log_g, degree=options.degree, chunk_size=options.chunk_size)
    if log_g is None:
        kv, norm = (every[: part.index].sum(dim=0) for every in part.gather(*own))
        decay_of_start = kv.new_ones(kv.shape[:2])
    else:
        # Log gates are summed in float64, because the sums run over a whole sequence. The decays
        # are exp of sums, not of differences, because a full reset is a sum of -inf.
        every_kv, every_norm, log_decay = (
            every[: part.index] for every in part.gather(*own, log_g.double().sum(dim=1))
        )
        after = torch.cat([log_decay, log_decay.new_zeros(1, *log_decay.shape[1:])])
        decay = after.flip(0).cumsum(dim=0).flip(0).exp().to(own.kv.dtype)  # (parts + 1, B, H)
        kv = (decay[1:, ..., None, None] * every_kv).sum(dim=0)
        norm = (decay[1:, ..., None] * every_norm).sum(dim=0)
        decay_of_start = decay[0]
    if start is None:
        return PowerState(kv, norm)
    return PowerState(
        kv + decay_of_start[..., None, None] * start.kv,
        norm + decay_of_start[..., None] * start.norm,
    )
