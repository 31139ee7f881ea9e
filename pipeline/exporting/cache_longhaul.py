"""The cache of an exported model, as transformers handles caches."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

Rows = list[int]


class Tokens(NamedTuple):
    """What a model that caches tokens holds in place of states: the embeddings of all tokens."""

    x: Tensor  # (B, T, D)

    def without_last(self, count: int) -> "Tokens":
        return Tokens(self.x[:, :-count])


class LonghaulLayer(CacheLayerMixin):
    """The states of one layer after the tokens so far, one for each group of rows of its cache."""

    is_compileable = False

    def __init__(self, states: list[Any], num_tokens: int) -> None:
        super().__init__()
        self.states = states
        self.num_tokens = num_tokens
        self.is_initialized = True

    def __repr__(self) -> str:
        return f"LonghaulLayer({self.num_tokens} tokens)"

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a class attribute in the base
        """Whether all states hold their tokens one by one, so that the last can be taken away."""
        return all(state is None or hasattr(state, "without_last") for state in self.states)

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        """-1, which is transformers' word for any length."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        count = abs(tokens_to_remove)
        self.states = [s if s is None else s.without_last(count) for s in self.states]
        self.num_tokens -= count

    def lazy_initialization(self, *_: Any) -> NoReturn:
        _refuse("lazy_initialization", "holds states, which only its model can change")

    def update(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update", "holds states, which only its model can change")


class LonghaulCache(Cache):
    """The states of all layers after the tokens so far, for groups of rows with the same shapes.

    Rows that have read different numbers of tokens are in different groups, where the states of a
    kind grow. A group without tokens has no state, None. There are no layers before a model has
    read tokens, and a single one if it caches tokens.
    """

    layers: list[LonghaulLayer]

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.rows: list[Rows] = [list(range(num_rows))]
        self.num_tokens = 0
        self._padded = 0  # the first of them, up to the last padding of any row

    def __repr__(self) -> str:
        return f"LonghaulCache({self.num_tokens} tokens of {self.batch_size} rows)"

    @property
    def batch_size(self) -> int:
        return sum(map(len, self.rows))

    @property
    def groups(self) -> list[tuple[Rows, list[Any] | None]]:
        """The rows of each group, and the state of every layer after them, None at the start."""
        found = []
        for group, rows in enumerate(self.rows):
            states = [layer.states[group] for layer in self.layers]
            has_read = any(state is not None for state in states)
            found.append((rows, states if has_read else None))
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, which is transformers' word for any length."""
        return -1

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.num_tokens > 0

    def store(
        self, groups: list[tuple[Rows, list[Any] | None]], num_tokens: int, mask: Tensor | None
    ) -> None:
        """Replace what is held, after so many more tokens, some of which the mask may leave out."""
        if mask is not None and not mask.all():
            last = int((~mask).any(dim=0).nonzero().max())
            self._padded = self.num_tokens + last + 1
        self.num_tokens += num_tokens
        self._hold(_joined(groups))

    def reset(self) -> None:
        """Forget all tokens."""
        self.num_tokens = self._padded = 0
        self._hold([(list(range(self.batch_size)), None)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes a copy of row beam_idx[n]."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; `indices` may be booleans."""
        self._take(torch.arange(self.batch_size)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes so many, one after the other."""
        self._take([row for row in range(self.batch_size) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take away so many last tokens, given as a negative number, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: found {tokens_to_remove}, wanted 0 or a negative number"
            )
        if tokens_to_remove == 0:
            return
        if not self.is_croppable:
            _refuse("crop", "has a state that cannot be cut back to fewer tokens")
        left, least = self.num_tokens + tokens_to_remove, max(self._padded, 1)
        if left < least:
            _refuse("crop", f"can be cut back to {least} tokens, not to {left}")
        super().crop(tokens_to_remove)
        self.num_tokens = left

    def activate_past_recording(self) -> None:
        """Nothing: `crop` needs no earlier states, or refuses."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update", "holds states, which only its model can change")

    def _take(self, wanted: Rows) -> None:
        """Row n becomes a copy of row wanted[n]."""
        groups = []
        for rows, states in self.groups:
            if now := [row for row, source in enumerate(wanted) if source in rows]:
                places = [rows.index(wanted[row]) for row in now]
                groups.append((now, select_rows(states, places)))
        self._hold(groups)

    def _hold(self, groups: list[tuple[Rows, list[Any] | None]]) -> None:
        self.rows = [rows for rows, _ in groups]
        count = max((len(states) for _, states in groups if states is not None), default=0)
        self.layers = [
            LonghaulLayer(
                [None if states is None else states[layer] for _, states in groups],
                self.num_tokens,
            )
            for layer in range(count or len(self.layers))
        ]


def select_rows(states: Any, rows: Rows) -> Any:
    """The states of these rows; None, of a group without tokens, stays None."""
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf[rows], states)


def _joined(groups: list[tuple[Rows, list[Any] | None]]) -> list[tuple[Rows, list[Any] | None]]:
    """The groups, joined where their states have the same shapes."""
    alike: dict[Any, list[tuple[Rows, Any]]] = {}
    for rows, states in groups:
        leaves = [leaf for leaf in pytree.tree_leaves(states) if leaf is not None]
        alike.setdefault(tuple(leaf.shape[1:] for leaf in leaves), []).append((rows, states))
    return [
        (
            [row for rows, _ in ones for row in rows],
            pytree.tree_map(_join, *(states for _, states in ones)),
        )
        for ones in alike.values()
    ]


def _join(*leaves: Tensor | None) -> Tensor | None:
    return None if leaves[0] is None else torch.cat(leaves)  # type: ignore[arg-type]


def _refuse(what: str, reason: str) -> NoReturn:
    raise ValueError(f"{what}: found a call for LonghaulCache, which {reason}; wanted none")
