"""Context parallelism: the state before a part of a sequence, and power attention on the part."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it yet

from longhaul.kernels import PowerState, power_attention, power_state
from longhaul.modules.sequence_part import SequencePart

State = TypeVar("State")


def state_before(
    part: SequencePart,
    own: tuple[Tensor, ...],
    compose: Callable[[tuple[Tensor, ...], State | None], State],
    start: State | None,
) -> State:
    """The state before the first token of this part.

    Only `own` is exchanged between ranks.

    Args:
        part: which part of the sequence this rank has.
        own: what the tokens of this part make of a state, for example a transition and the state
            that they leave when they start from zero: tensors of B rows. A document that begins in
            the part makes the transition zero.
        compose: from each of those tensors of all earlier parts, (parts, B, ...) in their order,
            perhaps none, and `start`, the state after those parts.
        start: the state at the beginning of the sequence, None where that is zero.
    """
    every = tuple(one[: part.index] for one in part.gather(*own))
    return attached(compose(every, start), every)


def tokens_before(
    part: SequencePart, own: tuple[Tensor, ...], most: int | None = None
) -> tuple[Tensor, ...]:
    """The last `most` tokens of all earlier parts, None: all, and those of this part after them.

    With `most` only the parts that hold these tokens send them, each its last `most` at most.

    Args:
        part: which part of the sequence this rank has.
        own: tensors (B, T, ...) of the tokens of this part.
        most: 0 or more.
    """
    if most == 0:
        return own
    if most is None:
        earlier = tuple(one[: part.index] for one in part.gather(*own))
        most = part.index * own[0].shape[1]
    else:
        reach = -(-most // own[0].shape[1])
        earlier = part.gather_before(reach, *(one[:, -most:] for one in own))
    joined = tuple(
        torch.cat([one.movedim(0, 1).flatten(1, 2)[:, -most:], mine], dim=1)
        for one, mine in zip(earlier, own, strict=True)
    )
    return attached(joined, earlier)


def attached(x: State, others: tuple[Tensor, ...]) -> State:
    """x, whose backward pass also reaches `others`.

    A part without earlier ones does not depend on what it gathered. Its rank must take part in the
    collective of the backward pass all the same, or the other ranks would wait for it.
    """
    attach: Callable[..., Any] = _Attached.apply
    result: State = pytree.tree_map(lambda one: attach(one, *others), x)
    return result


class _Attached(torch.autograd.Function):
    """x itself; its backward pass always reaches `others`, with no gradient."""

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
    part: SequencePart,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None,
    start: PowerState | None,
    options: PowerOptions,
) -> Float[Tensor, "B T H V"]:
    """The output for the tokens of this part.

    `start` is the state at the beginning of every sequence, None where that is zero. Documents
    within a sequence are separated by gates of zero.
    """
    own: tuple[Tensor, ...] = power_state(
        k, v, log_g, degree=options.degree, chunk_size=options.chunk_size
    )
    if log_g is not None:
        # Log gates are summed in float64, because the sums run over a whole sequence.
        own = (*own, log_g.double().sum(dim=1))
    state = state_before(part, own, _composed, start)
    mixed, _ = power_attention(q, k, v, log_g, initial_state=state, **options._asdict())
    return mixed


def _composed(every: tuple[Tensor, ...], start: PowerState | None) -> PowerState:
    """The state after all earlier parts.

    Let S be the state at the beginning of the sequence, S_j the state that the tokens of part j
    leave when they start from zero, and D_j the sum of their log gates. The state before part r is

        exp(D_0 + ... + D_(r-1)) S + sum_(j < r) exp(D_(j+1) + ... + D_(r-1)) S_j
    """
    every_kv, every_norm, *gates = every
    if gates:
        # The decays are exp of sums, not of differences, because a full reset is a sum of -inf.
        log_decay = gates[0]
        after = torch.cat([log_decay, log_decay.new_zeros(1, *log_decay.shape[1:])])
        decay = after.flip(0).cumsum(dim=0).flip(0).exp().to(every_kv.dtype)  # (parts + 1, B, H)
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
