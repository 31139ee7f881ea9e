"""Context parallelism: the state before a part of a sequence, and power attention on the part."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels import PowerState, power_attention, power_state
from longhaul.modules.sequence_part import SequencePart

Rows = tuple[Tensor, ...]
"""Tensors (R, ...) of R rows that do not depend on each other."""


def state_before(
    part: SequencePart, own: Rows, start: Rows, after: Callable[[Rows, Rows], Rows]
) -> Rows:
    """The state before the first token of this part.

    Each rank has a share of the rows, of which it computes the state before every part. So in the
    forward pass a rank sends its `own` once and a state once, however many ranks there are; in the
    backward pass, the gradients of both.

    Args:
        part: which part of the sequence this rank has.
        own: what the tokens of this part make of a state, for example a transition and the state
            that they leave when they start from zero. A document that begins in the part makes the
            transition zero.
        start: the state at the beginning of the sequence.
        after: the state after a part, from its `own` and the state before it. It is given some of
            the rows, perhaps none, and is not told which.
    """
    rows = own[0].shape[0]
    shares = [rows // part.count + (index < rows % part.count) for index in range(part.count)]
    share = shares[part.index]
    every = part.exchange(shares, [share] * part.count, *own)
    *earlier, _ = zip(*(x.unflatten(0, (part.count, share)) for x in every), strict=True)
    # Copied, as a view would keep all rows.
    states = [tuple(x.split(shares)[part.index].clone() for x in start)]
    for one in earlier:
        states.append(after(one, states[-1]))
    before = map(torch.cat, zip(*states, strict=True))
    return part.exchange([share] * part.count, shares, *before)


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
    joined = (
        torch.cat([one.movedim(0, 1).flatten(1, 2)[:, -most:], mine], dim=1)
        for one, mine in zip(earlier, own, strict=True)
    )
    return _attached(joined, earlier)


def _attached(tensors: Iterable[Tensor], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors, whose backward pass also reaches `others`.

    A part without earlier ones does not depend on what it gathered. Its rank must take part in the
    collective of the backward pass all the same, or the other ranks would wait for it.
    """
    attach: Callable[..., Any] = _Attached.apply
    return tuple(attach(one, *others) for one in tensors)


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
    kv, norm = power_state(k, v, log_g, degree=options.degree, chunk_size=options.chunk_size)
    if log_g is None:
        decay = torch.ones_like(norm)
    else:
        # Log gates are summed in float64, because the sums run over a whole part.
        total = log_g.double().sum(dim=1).exp().to(norm.dtype)
        decay = total[..., None].expand_as(norm)
    own = torch.cat([kv, norm[..., None], decay[..., None]], dim=-1).flatten(0, 2)
    if start is None:
        first = own.new_zeros(()).expand(own.shape[0], own.shape[1] - 1)
    else:
        first = torch.cat([start.kv, start.norm[..., None]], dim=-1).flatten(0, 2)
    (before,) = state_before(part, (own,), (first,), _after_part)
    state = PowerState(before[:, :-1].reshape(kv.shape), before[:, -1].reshape(norm.shape))
    mixed, _ = power_attention(q, k, v, log_g, initial_state=state, **options._asdict())
    return mixed


def _after_part(own: Rows, state: Rows) -> Rows:
    """exp(D) S + S_own in each row, with D the sum of the part's log gates: -inf for a reset."""
    (added, decay), (before,) = own[0].split([own[0].shape[1] - 1, 1], dim=1), state
    return (torch.addcmul(added, decay, before),)
