"""Softmax attention within the documents of a batch, for CPUs.

A document costs what it does alone: no pair of tokens of two documents is computed, and no mask is
written out. Documents are read in place. Short ones of equal length are computed together, since a
call costs more than the work for some dozen tokens, and copied unless they are equally spaced.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.kernels.common.custom_ops import custom_op, saving

QUERIES_AT_ONCE = 1024
"""A bias is written out for a block of this many queries at a time."""

SHORT = 64
"""Documents of fewer tokens are copied to be computed together: a call takes as long as they do."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def document_softmax(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G T K"],
    v: Float[Tensor, "B G T V"],
    slopes: Float[Tensor, "H"] | None,
    age: Int[Tensor, "B T"],
    scale: float | None = None,
) -> Float[Tensor, "B H T V"]:
    """`masked_softmax` with arguments of these names. It is one op in a compiled graph."""
    device, K, V = q.device.type, k.shape[-1], v.shape[-1]
    if not q.is_meta and torch.is_autocast_enabled(device):
        q, k, v = (one.to(torch.get_autocast_dtype(device)) for one in (q, k, v))
    if (queries := q.shape[1] // k.shape[1]) > 1:  # heads must be equally many for torch's kernel
        k, v = (one.repeat_interleave(queries, dim=1) for one in (k, v))
    if K != V:  # which torch's kernel does not take
        q, k, v = (F.pad(one, (0, max(K, V) - one.shape[-1])) for one in (q, k, v))
    scale = 1 / math.sqrt(K) if scale is None else scale
    mixed, _ = _document_softmax(q, k, v, slopes, age, scale=scale)
    return mixed[..., :V]  # type: ignore[no-any-return]


@custom_op(
    "document_softmax",
    "(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor age, *, float scale) "
    "-> (Tensor, Tensor)",
)
def _document_softmax(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, age: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V), and the log of each query's sum of weights (B, H, T)."""
    mixed, log_sum = _empty_results(q)
    inputs, results = _by_token(q, k, v), _by_token(mixed, log_sum)
    for documents in _documents(age):
        own_q, own_k, own_v = (documents.read(one) for one in inputs)
        own_results = [documents.read(one) for one in results]
        for block, end, bias in _blocks(documents.length, slopes, q.dtype):
            found = _flash(
                *(own_q[:, :, block], own_k[:, :, :end], own_v[:, :, :end]),
                is_causal=bias is None,
                attn_mask=bias,
                scale=scale,
            )
            for own, part in zip(own_results, found, strict=True):
                own[:, :, block] = part
        documents.write(results, own_results)
    return mixed, log_sum


@custom_op(
    "document_softmax_backward",
    "(Tensor dmixed, Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor age, Tensor mixed, "
    "Tensor log_sum, *, float scale) -> (Tensor, Tensor, Tensor)",
)
def _document_softmax_backward(
    dmixed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    age: Tensor,
    mixed: Tensor,
    log_sum: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_results(one)[0].zero_() for one in (q, k, v))
    inputs, gradients = _by_token(dmixed, q, k, v, mixed, log_sum), _by_token(dq, dk, dv)
    for documents in _documents(age):
        own = [documents.read(one) for one in inputs]
        own_gradients = [documents.read(one) for one in gradients]
        for block, end, bias in _blocks(documents.length, slopes, q.dtype):
            dout, queries, out, log = (own[n][:, :, block] for n in (0, 1, 4, 5))
            keys, values = (own[n][:, :, :end] for n in (2, 3))
            found = _flash_backward(
                *(dout, queries, keys, values, out, log),
                dropout_p=0.0,
                is_causal=bias is None,
                attn_mask=bias,
                scale=scale,
            )
            places = (block, slice(end), slice(end))
            for gradient, place, part in zip(own_gradients, places, found, strict=True):
                gradient[:, :, place] += part
        documents.write(gradients, own_gradients)
    return dq, dk, dv


@dataclass
class _EqualDocuments:
    """Documents of one length, by the places of their first tokens in the flattened batch."""

    starts: Int[Tensor, " N"]
    length: int

    def __post_init__(self) -> None:
        steps = self.starts.diff().unique().tolist()
        self.step = None if len(steps) > 1 else steps[0] if steps else self.length
        """Tokens from one document to the next; None where they are not equally spaced."""

    def read(self, x: Float[Tensor, "BT H ..."]) -> Float[Tensor, "N H length ..."]:
        """A view where the documents are equally spaced, a copy elsewhere."""
        if self.step is None:
            return x[self._tokens()].transpose(1, 2)
        first, last = self.starts[0], self.starts[-1]
        return x[first : last + self.length].unfold(0, self.length, self.step).movedim(-1, 2)

    def write(self, results: list[Tensor], copies: list[Tensor]) -> None:
        """Write what was read from `results`, and changed, back to them, unless it is a view."""
        if self.step is None:
            for result, copy in zip(results, copies, strict=True):
                result[self._tokens()] = copy.transpose(1, 2)

    def _tokens(self) -> Int[Tensor, "N length"]:
        return self.starts[:, None] + torch.arange(self.length)


def _documents(age: Int[Tensor, "B T"]) -> Iterator[_EqualDocuments]:
    """All documents, by length. Long ones that are not equally spaced come one by one.

    Without values, as in planning, every row is a document, and no copy is planned.
    """
    B, T = age.shape
    starts = torch.arange(0, B * T, T)
    if not age.is_meta:
        starts = (age.flatten() == 0).nonzero().flatten()
    lengths = torch.cat([starts[1:], starts.new_tensor([B * T])]) - starts
    for length in lengths.unique().tolist():
        together = _EqualDocuments(starts[lengths == length], length)
        if length < SHORT or together.step is not None:
            yield together
        else:
            yield from (_EqualDocuments(one, length) for one in together.starts.split(1))


def _blocks(
    length: int, slopes: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Queries of a document, the end of the keys that they see, and the bias: none is causal."""
    if slopes is None:
        yield slice(None), length, None
        return
    for start in range(0, length, QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, length)
        bias = _causal_bias(end - start, end, slopes).to(dtype)
        yield slice(start, end), end, bias


def _causal_bias(T: int, S: int, slopes: Float[Tensor, "H"]) -> Float[Tensor, "1 H T S"]:
    """-m_h (t - i) for the last T of S tokens; -inf for the keys after a query.

    torch's fused kernel takes no bias of three dimensions.
    """
    position = torch.arange(S, dtype=slopes.dtype, device=slopes.device)
    distance = position[S - T :, None] - position
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)[None]


def _by_token(*tensors: Float[Tensor, "B H T ..."]) -> list[Float[Tensor, "BT H ..."]]:
    """The tokens of all rows after one another: views where tokens come first in memory."""
    return [one.transpose(1, 2).flatten(0, 1) for one in tensors]


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised results with tokens first in memory."""
    mixed = q.transpose(1, 2).new_empty(q.transpose(1, 2).shape)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return mixed.transpose(1, 2), mixed.new_empty(mixed.shape[:3], dtype=dtype).transpose(1, 2)


@_document_softmax.register_fake
def _(q: Tensor, *_tensors: Any, scale: float) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@_document_softmax_backward.register_fake
def _(_dmixed: Tensor, *inputs: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_results(one)[0] for one in inputs[:3])
    return dq, dk, dv


def _differentiate(ctx: Any, dmixed: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = _document_softmax_backward(dmixed, *ctx.saved_tensors, **ctx.settings)
    return *gradients, None, None


_document_softmax.register_autograd(_differentiate, setup_context=saving(1))
