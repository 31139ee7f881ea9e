"""The cache of an exported model, as transformers handles caches."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache

Rows = list[int]


class LonghaulCache(Cache):
    """The states of all layers after the tokens so far, for groups of rows with the same shapes.

    Rows that have read different numbers of tokens are in different groups, where the states of a
    kind grow. A group without tokens has no state, None.
    """

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.groups: list[tuple[Rows, Any]] = [(list(range(num_rows)), None)]
        self.num_tokens = 0

    def __repr__(self) -> str:
        return f"LonghaulCache({self.num_tokens} tokens of {self.batch_size} rows)"

    @property
    def batch_size(self) -> int:
        return sum(len(rows) for rows, _ in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, which is transformers' word for any length."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.num_tokens > 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.groups = [(list(range(self.batch_size)), None)]
        self.num_tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes a copy of row beam_idx[n]."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; `indices` may be booleans."""
        self._take(torch.arange(self.batch_size)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes so many, one after the other."""
        self._take([row for row in range(self.batch_size) for _ in range(repeats)])

    def crop(self, *_: Any) -> NoReturn:
        self._refuse("crop", "cannot be cut back to fewer tokens")

    def activate_past_recording(self) -> NoReturn:
        self._refuse("activate_past_recording", "does not keep states of earlier tokens")

    def update(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("update", "holds states, which only its model can change")

    def _refuse(self, what: str, reason: str) -> NoReturn:
        raise ValueError(f"{what}: found a call for LonghaulCache, which {reason}; wanted none")

    def _take(self, wanted: Rows) -> None:
        """Row n becomes a copy of row wanted[n]."""
        groups = []
        for rows, state in self.groups:
            if now := [row for row, source in enumerate(wanted) if source in rows]:
                places = [rows.index(wanted[row]) for row in now]
                groups.append((now, select_rows(state, places)))
        self.groups = groups

    def join_groups(self) -> None:
        """Join the groups whose states have the same shapes."""
        alike: dict[Any, list[tuple[Rows, Any]]] = {}
        for rows, state in self.groups:
            shapes = tuple(leaf.shape[1:] for leaf in _leaves(state))
            alike.setdefault(shapes, []).append((rows, state))
        self.groups = [
            (
                [row for rows, _ in groups for row in rows],
                pytree.tree_map(_join, *(state for _, state in groups)),
            )
            for groups in alike.values()
        ]


def select_rows(state: Any, rows: Rows) -> Any:
    """The states of these rows; None, of a group without tokens, stays None."""
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf[rows], state)


def _leaves(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if leaf is not None]


def _join(*leaves: Tensor | None) -> Tensor | None:
    return None if leaves[0] is None else torch.cat(leaves)
