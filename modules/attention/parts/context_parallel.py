"""Context parallelism: the state before a part of a sequence, and power attention on the part."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it yet

from longhaul.kernels import PowerState, power_attention, power_state
from longhaul.modules.documents import Documents

State = TypeVar("State")


def state_before(
    documents: Documents,
    own: tuple[Tensor, ...],
    compose: Callable[[tuple[Tensor, ...], State | None], State],
    start: State | None,
) -> State:
    """The state of the first document before its first token in this part.

    Only `own` is exchanged between ranks.

    Args:
        own: what the last document of this part makes of a state, for example a transition and the
            state that its tokens leave when they start from zero: tensors of `rows` rows.
        compose: from each of those tensors of all earlier parts of the first document, (parts,
            rows, ...) in their order, perhaps none, and `start`, the state after those parts.
        start: the state at the beginning of the document, None where that is zero.
    """
    every = documents.gather_earlier_parts(*own)
    attached: Callable[..., Any] = _Attached.apply
    state: State = pytree.tree_map(lambda x: attached(x, *every), compose(every, start))
    return state


class _Attached(torch.autograd.Function):
    """x itself; its backward pass always reaches `others`, with no gradient.

    A part without earlier ones does not depend on what it gathered. Its rank must take part in the
    collective of the backward pass all the same, or the other ranks would wait for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.num_others = len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None,) * ctx.num_others


class PowerOptions(NamedTuple):
    """The arguments of `power_attention` of these names, as a variant chooses them."""

    degree: int
    scale: float | None
    normalize: bool
    chunk_size: int | None


def context_parallel_attention(
    documents: Documents,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_g: Float[Tensor, "B T H"] | None,
    start: PowerState | None,
    options: PowerOptions,
) -> Float[Tensor, "B T H V"]:
    """The output for the tokens of this part.

    `start` is the state at the beginning of every document, None where that is zero.
    """
    arguments = options._asdict()
    own = _own_state(documents, k, v, log_g, options)
    first_start = None if start is None else PowerState(*(x[: documents.rows] for x in start))
    state = state_before(documents, own, _composed, first_start)
    if documents.count == documents.rows:
        mixed, _ = power_attention(q, k, v, log_g, initial_state=state, **arguments)
        return mixed
    # All documents but the first begin in this part. They are a call of their own, because one call
    # would need an initial state for each of them, and keep those zeros until the backward pass.
    sizes, cu_seqlens = documents.split_after_first()
    first, others = zip(
        *((None, None) if x is None else x.split(sizes, dim=1) for x in (q, k, v, log_g)),
        strict=True,
    )
    others_start = None if start is None else PowerState(*(x[documents.rows :] for x in start))
    mixed_first, _ = power_attention(*first, initial_state=state, **arguments)
    mixed_others, _ = power_attention(
        *others, initial_state=others_start, cu_seqlens=cu_seqlens, **arguments
    )
    return torch.cat([mixed_first, mixed_others], dim=1)


def _own_state(
    documents: Documents, k: Tensor, v: Tensor, log_g: Tensor | None, options: PowerOptions
) -> tuple[Tensor, ...]:
    """The state that the last document leaves from zero, and the sum of its log gates, if any."""
    k, v = documents.last_document(k), documents.last_document(v)
    log_g = None if log_g is None else documents.last_document(log_g)
    own = power_state(k, v, log_g, degree=options.degree, chunk_size=options.chunk_size)
    # Log gates are summed in float64, because the sums run over a whole sequence.
    return tuple(own) if log_g is None else (*own, log_g.double().sum(dim=1))


def _composed(every: tuple[Tensor, ...], start: PowerState | None) -> PowerState:
    """The state after all earlier parts.

    In part j, let S_j be the state that the tokens leave when they start from zero, and D_j the sum
    of their log gates. From a state S before part a, that before part r is

        exp(D_a + ... + D_(r-1)) S + sum_(a <= j < r) exp(D_(j+1) + ... + D_(r-1)) S_j
    """
    every_kv, every_norm, *gates = every
    if gates:
        # The decays are exp of sums, not of differences, because a full reset is a sum of -inf.
        log_decay = gates[0]
        after = torch.cat([log_decay, log_decay.new_zeros(1, *log_decay.shape[1:])])
        decay = after.flip(0).cumsum(dim=0).flip(0).exp().to(every_kv.dtype)  # (parts + 1, rows, H)
        kv = (decay[1:, ..., None, None] * every_kv).sum(dim=0)
        norm = (decay[1:, ..., None] * every_norm).sum(dim=0)
        decay_of_start = decay[0]
    else:
        kv, norm = every_kv.sum(dim=0), every_norm.sum(dim=0)
        decay_of_start = kv.new_ones(kv.shape[:2])
    if start is None:
        return PowerState(kv, norm)
    return PowerState(
        kv + decay_of_start[..., None, None] * start.kv,
        norm + decay_of_start[..., None] * start.norm,
    )
