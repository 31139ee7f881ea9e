"""The op on one part of a sequence, after what every earlier part leaves behind."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels import PowerState, power_attention, power_state
from longhaul.modules.documents import Documents


class PowerSettings(NamedTuple):
    """What a kind asks of the op: the arguments of `power_attention` of these names."""

    degree: int
    scale: float | None
    normalize: bool
    chunk_size: int | None


def mix_part(
    documents: Documents,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_g: Float[Tensor, "B T H"] | None,
    start: PowerState | None,
    settings: PowerSettings,
) -> Float[Tensor, "B T H V"]:
    """The output for this part's tokens; `start` is the state where a document begins."""
    how = settings._asdict()
    state = _state_before(documents, k, v, log_g, start, settings)
    if documents.count == documents.rows:
        mixed, _ = power_attention(q, k, v, log_g, initial_state=state, **how)
        return mixed
    # Apart from the first, documents begin here: states of zero for them would be kept until the
    # backward pass for nothing.
    sizes, cu_seqlens = documents.after_first()
    first, others = zip(
        *((None, None) if x is None else x.split(sizes, dim=1) for x in (q, k, v, log_g)),
        strict=True,
    )
    state_at_start = None if start is None else PowerState(*(x[documents.rows :] for x in start))
    went_on, _ = power_attention(*first, initial_state=state, **how)
    began, _ = power_attention(*others, initial_state=state_at_start, cu_seqlens=cu_seqlens, **how)
    return torch.cat([went_on, began], dim=1)


def _state_before(
    documents: Documents,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    start: PowerState | None,
    settings: PowerSettings,
) -> PowerState:
    """The first document's state before its first token in this part.

    With S_j what the tokens of the last document in part j leave behind by themselves, D_j the sum
    of their log gates and S the state at the start, that is for a document that began in part a, in
    part r,

        exp(D_a + ... + D_(r-1)) S + sum_(a <= j < r) exp(D_(j+1) + ... + D_(r-1)) S_j

    Only S_j and D_j cross between parts. S is added here, not to S_a: every part then computes the
    same graph, whichever parameters are frozen and wherever documents begin, as the collectives of
    the backward pass need it.
    """
    k, v = documents.last_document(k), documents.last_document(v)
    own = None if log_g is None else documents.last_document(log_g)
    left = power_state(k, v, own, degree=settings.degree, chunk_size=settings.chunk_size)
    if own is None:
        kv, norm = (every.sum(dim=0) for every in documents.gather_before(*left))
        since_start = kv.new_ones(kv.shape[:2])
    else:
        # In float64, as sums of logs over a whole sequence; exp of sums, not of differences: a
        # full reset is a sum of -inf.
        every_kv, every_norm, log_decay = documents.gather_before(*left, own.double().sum(dim=1))
        after = torch.cat([log_decay, log_decay.new_zeros(1, *log_decay.shape[1:])])
        decay = after.flip(0).cumsum(dim=0).flip(0).exp().to(left.kv.dtype)  # (parts + 1, rows, H)
        kv = (decay[1:, ..., None, None] * every_kv).sum(dim=0)
        norm = (decay[1:, ..., None] * every_norm).sum(dim=0)
        since_start = decay[0]
    if start is None:
        return PowerState(kv, norm)
    rows = documents.rows
    return PowerState(
        kv + since_start[..., None, None] * start.kv[:rows],
        norm + since_start[..., None] * start.norm[:rows],
    )
