"""Sequences continued token by token: read in pieces through the state, then recurrent steps."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it yet

from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel

# Longer windows are read in pieces of so many tokens where a state carries the past.
TOKENS_AT_ONCE = 4096


def tokens_at_once(model: LanguageModel, T: int) -> int | None:
    """Tokens of a window of T to read at a time, carrying the state; None: all of them.

    All of them where a layer keeps no state of fixed size, where its state would cost more than
    pairs of tokens do, and where its positions depend on the window's length.
    """
    if T <= TOKENS_AT_ONCE:
        return None
    backend = "triton" if next(model.parameters()).is_cuda else "torch"
    for block in model.blocks:
        attention = cast(Block, block).attention
        if attention.rotary is not None and attention.rotary.depends_on_length:
            return None
        if not attention.form(T, backend).startswith("chunked"):
            return None
    return TOKENS_AT_ONCE


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen by its logits."""

    vocabulary: int
    """The tokenizer's ids; rows of logits beyond them only pad the embedding."""

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token."""

    top_k: int | None = None
    """Only the k likeliest tokens, and those as likely as the k-th; None means all."""

    top_p: float | None = None
    """Of those only the likeliest ones until their probabilities sum to p or more."""

    def probabilities(self, logits: Float[Tensor, "B R"]) -> Float[Tensor, "B V"]:
        """Of every token to be the next one; the temperature is above 0."""
        logits = logits[:, : self.vocabulary]
        if self.top_k is not None and self.top_k < self.vocabulary:
            kth = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        # Without the difference, small temperatures would make logits infinite.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        found: Tensor = logits.softmax(dim=-1)
        if self.top_p is None:
            return found
        ordered, token = found.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= self.top_p, 0.0)
        found = torch.zeros_like(found).scatter(-1, token, ordered)
        return found / found.sum(dim=-1, keepdim=True)

    def choose(
        self, logits: Float[Tensor, "B R"], generators: Sequence[torch.Generator | None]
    ) -> Int[Tensor, "B"]:
        """A token a row, each drawn with a generator of its own."""
        if self.temperature == 0:
            return logits[:, : self.vocabulary].argmax(dim=-1)
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(self.probabilities(logits), generators, strict=True)
        ]
        return torch.cat(drawn)


@dataclass
class Session:
    """One sequence: all of its tokens but the last ones are in the state."""

    unread: list[int]
    """Tokens that follow what the state has seen."""

    state: list[Any] | None = None
    """As the model keeps it, of one row; None before the first token."""

    generator: torch.Generator | None = None
    """What tokens are drawn with."""

    is_done: bool = False
    """Whoever takes the tokens sets it: no more are wanted."""

    def read(self, model: LanguageModel) -> Float[Tensor, "1 R"]:
        """Logits of the next token; what was unread is in the state now."""
        tokens = torch.tensor([self.unread], device=next(model.parameters()).device)  # (1, T)
        for part in tokens.split(tokens_at_once(model, tokens.shape[1]) or tokens.shape[1], dim=1):
            logits, self.state = model.prefill(part, self.state)
        self.unread = []
        return logits


def decode(
    model: LanguageModel, sessions: Sequence[Session], *, num_tokens: int, sampling: Sampling
) -> Iterator[tuple[int, int]]:
    """Continue sequences of any lengths, each as it would be alone.

    All are read first, one after the other. Those whose states have one shape then share their
    steps: of kinds of linear cost all do, where keys and values are kept those of equal length.

    Yields:
        The index of a session, and its next token, which is unread until the one after it.
    """
    logits = [session.read(model) for session in sessions]
    alike: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
    for index, session in enumerate(sessions):
        alike[tuple(leaf.shape for leaf in pytree.tree_leaves(session.state))].append(index)
    for group in alike.values():
        members = [sessions[index] for index in group]
        together = torch.cat([logits[index] for index in group])
        for row, token in _decode_batch(model, members, together, num_tokens, sampling):
            yield group[row], token


def _decode_batch(
    model: LanguageModel,
    sessions: list[Session],
    logits: Float[Tensor, "B R"],
    num_tokens: int,
    sampling: Sampling,
) -> Iterator[tuple[int, int]]:
    """`decode` of sessions that were read, whose states have one shape."""
    rows = list(range(len(sessions)))
    state = pytree.tree_map(lambda *parts: torch.cat(parts), *(one.state for one in sessions))
    for session in sessions:
        session.state = None  # until it leaves: it is in the batch's
    for count in range(num_tokens):
        if count:
            going = [place for place, row in enumerate(rows) if not sessions[row].is_done]
            if len(going) < len(rows):
                for place, row in enumerate(rows):
                    if sessions[row].is_done:
                        sessions[row].state = _copy_row(state, place)
                if not going:
                    return
                state = _select_rows(state, torch.tensor(going, device=logits.device))
                rows = [rows[place] for place in going]
            last = [sessions[row].unread.pop() for row in rows]
            logits, state = model.step(torch.tensor(last, device=logits.device), state)
        chosen = sampling.choose(logits, [sessions[row].generator for row in rows]).tolist()
        for row, token in zip(rows, chosen, strict=True):
            sessions[row].unread.append(token)
        yield from zip(rows, chosen, strict=True)
    for place, row in enumerate(rows):
        sessions[row].state = _copy_row(state, place)


def _select_rows(state: list[Any], rows: Int[Tensor, "rows"]) -> list[Any]:
    found: list[Any] = pytree.tree_map(lambda part: part[rows], state)
    return found


def _copy_row(state: list[Any], place: int) -> list[Any]:
    """One row, which does not keep the batch's memory."""
    found: list[Any] = pytree.tree_map(lambda part: part[place : place + 1].clone(), state)
    return found
