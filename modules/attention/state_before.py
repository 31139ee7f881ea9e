"""The power state before one part of a sequence, from what every earlier part leaves behind."""

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels import PowerState, power_state
from longhaul.modules.documents import Documents


def state_before(
    documents: Documents,
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_g: Float[Tensor, "B T H"] | None,
    start: PowerState | None,
    *,
    degree: int,
    chunk_size: int | None,
) -> PowerState:
    """The state of every document before its first token in this part.

    With S_j what the tokens of the last document in part j leave behind by themselves, D_j the sum
    of their log gates and `start` the state S where a document begins, that is for a document that
    began in part a < r, this part,

        exp(D_a + ... + D_(r-1)) S + sum_(a <= j < r) exp(D_(j+1) + ... + D_(r-1)) S_j

    Only S_j and D_j cross between parts. S is added here, not to S_a: every part then computes the
    same graph, whichever parameters are frozen and wherever documents begin, as the collectives of
    the backward pass need it.
    """
    k, v = documents.last_document(k), documents.last_document(v)
    own = None if log_g is None else documents.last_document(log_g)
    left = power_state(k, v, own, degree=degree, chunk_size=chunk_size)
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
    rows = documents.rows
    if start is None:
        start = PowerState(*(x.new_zeros(documents.count, *x.shape[1:]) for x in (kv, norm)))
    kv = kv + since_start[..., None, None] * start.kv[:rows]
    norm = norm + since_start[..., None] * start.norm[:rows]
    return PowerState(documents.carry_on(start.kv, kv), documents.carry_on(start.norm, norm))
