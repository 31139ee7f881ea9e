"""Continues sequences: prompts are read in pieces through the state, tokens by recurrent steps."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it yet

from longhaul.kernels import PowerState
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.generation.steps import Steps


def tokens_per_pass(device: torch.device) -> int:
    """About how many tokens, of all windows together, to read at a time.

    They keep the device busy, and their activations take little of its memory.
    """
    return 32_768 if device.type == "cuda" else 4_096


def tokens_at_once(model: LanguageModel, T: int) -> int | None:
    """How many of a window's T tokens to read at a time, carrying the state; None means all.

    All are read at once if a layer does not pass on a state (it has none of fixed size, or one
    that costs more than pairs of tokens), or if its positions depend on the window's length.
    """
    if model.positions is not None:
        model.positions.check_length(T)  # of pieces one after the other
    device = next(model.parameters()).device
    if tokens_per_pass(device) >= T:
        return None
    backend = "triton" if device.type == "cuda" else "torch"
    for block in model.blocks:
        attention = cast(Block, block).attention
        if attention.rotary is not None and attention.rotary.depends_on_length:
            return None
        if not attention.passes_on_state(T, backend):
            return None
    return tokens_per_pass(device)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from logits."""

    vocabulary: int
    """Number of the tokenizer's ids; logits beyond them belong to padding of the embedding."""

    temperature: float = 0.0
    """Logits are divided by this; 0 chooses the likeliest token."""

    top_k: int | None = None
    """Choose only among the k likeliest tokens, and any as likely as the k-th; None means all."""

    top_p: float | None = None
    """Choose only among the likeliest of those, whose probabilities sum to p or just more."""

    def probabilities(self, logits: Float[Tensor, "B R"]) -> Float[Tensor, "B V"]:
        """The probability of each next token; the temperature must be above 0."""
        logits = logits[:, : self.vocabulary]
        if self.top_k is not None and self.top_k < self.vocabulary:
            kth = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        # The maximum is subtracted, since small temperatures would make logits infinite.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        probabilities: Tensor = logits.softmax(dim=-1)
        if self.top_p is None:
            return probabilities
        ordered, token = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= self.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, token, ordered)
        return probabilities / probabilities.sum(dim=-1, keepdim=True)

    def choose(
        self, logits: Float[Tensor, "B R"], generators: Sequence[torch.Generator | None]
    ) -> Int[Tensor, "B"]:
        """One token per row, each drawn with the row's own generator."""
        if self.temperature == 0:
            return logits[:, : self.vocabulary].argmax(dim=-1)
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(self.probabilities(logits), generators, strict=True)
        ]
        return torch.cat(drawn)


@dataclass
class Session:
    """A sequence that is being continued: the state has read all its tokens but the last ones."""

    unread: list[int]
    """The last tokens, which the state has not read."""

    state: list[Any] | None = None
    """The model's state, of one row; None before the first token."""

    generator: torch.Generator | None = None
    """Draws the tokens; None means torch's global generator."""

    is_done: bool = False
    """Set by the consumer of `decode` when it wants no more tokens of this sequence."""

    def read(self, model: LanguageModel) -> Float[Tensor, "1 R"]:
        """Read the unread tokens into the state; return logits of the next token."""
        tokens = torch.tensor([self.unread], device=next(model.parameters()).device)  # (1, T)
        for part in tokens.split(tokens_at_once(model, tokens.shape[1]) or tokens.shape[1], dim=1):
            logits, self.state = model.prefill(part, self.state)
        self.unread = []
        return logits


def decode(
    model: LanguageModel,
    sessions: Sequence[Session],
    *,
    num_tokens: int,
    sampling: Sampling,
    has_bfloat16_states: bool = False,
) -> Iterator[tuple[int, int]]:
    """Continue sequences of any lengths, each with the same result as alone, up to rounding.

    First all are read, one after the other. Then sequences whose states have the same shape are
    decoded as one batch: with a state of fixed size all sequences, with a cache of keys and values
    those of equal length. With `has_bfloat16_states` states of fixed size are bfloat16 from there
    on, as `PowerState.to_bfloat16` describes.

    Raises:
        ValueError: a sequence would have more tokens than the model has learned positions.

    Yields:
        The index of a session, and its next token. The token stays in `unread` until the next step.
    """
    if model.positions is not None:
        for session in sessions:
            before = 0 if session.state is None else int(session.state[-1].max())
            model.positions.check_length(before + len(session.unread) + num_tokens - 1)
    logits = [session.read(model) for session in sessions]
    if has_bfloat16_states:
        for session in sessions:
            session.state = map_power_states(PowerState.to_bfloat16, session.state)
    alike: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
    for index, session in enumerate(sessions):
        alike[tuple(leaf.shape for leaf in pytree.tree_leaves(session.state))].append(index)
    for group in alike.values():
        members = [sessions[index] for index in group]
        together = torch.cat([logits[index] for index in group])
        for row, token in _decode_batch(model, members, together, num_tokens, sampling):
            yield group[row], token


def map_power_states(change: Callable[[PowerState], PowerState], state: Any) -> Any:
    """A model's state with every `PowerState` in it changed."""
    return pytree.tree_map(
        lambda part: change(part) if isinstance(part, PowerState) else part,
        state,
        is_leaf=lambda part: isinstance(part, PowerState),
    )


def _decode_batch(
    model: LanguageModel,
    sessions: list[Session],
    logits: Float[Tensor, "B R"],
    num_tokens: int,
    sampling: Sampling,
) -> Iterator[tuple[int, int]]:
    """`decode` for sessions that have been read and whose states have the same shape."""
    rows = list(range(len(sessions)))
    step = Steps(model)
    # A copy, which steps may overwrite.
    state = pytree.tree_map(lambda *parts: torch.cat(parts), *(one.state for one in sessions))
    for session in sessions:
        session.state = None  # The batch's state holds it until the session leaves the batch.
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
            logits, state = step(torch.tensor(last, device=logits.device), state)
        chosen = sampling.choose(logits, [sessions[row].generator for row in rows]).tolist()
        for row, token in zip(rows, chosen, strict=True):
            sessions[row].unread.append(token)
        yield from zip(rows, chosen, strict=True)
    for place, row in enumerate(rows):
        sessions[row].state = _copy_row(state, place)


def _select_rows(state: list[Any], rows: Int[Tensor, "rows"]) -> list[Any]:
    selected: list[Any] = pytree.tree_map(lambda leaf: leaf[rows], state)
    return selected


def _copy_row(state: list[Any], place: int) -> list[Any]:
    """A copy of one row, which does not keep the batch's memory alive."""
    row: list[Any] = pytree.tree_map(lambda leaf: leaf[place : place + 1].clone(), state)
    return row
