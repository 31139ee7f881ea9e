"""Steps of a model one after the other: on a GPU a step is recorded once, and then replayed."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it yet

from longhaul.modules.language_model import LanguageModel

logger = logging.getLogger(__name__)

# Runs what was recorded again, on the memory that it was recorded with.
Replay = Callable[[], None]


class Steps:
    """`LanguageModel.step` that overwrites states, token after token.

    Starting a step's hundreds of kernels one by one takes a GPU's host longer than the GPU takes to
    run them. Where states are overwritten, the second step of a batch is therefore recorded as a
    CUDA graph, and further steps replay it; the first one compiles the kernels.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._overwritten: list[Any] | None = None  # the state of a batch whose steps can be one
        self._replay: Replay | None = None
        self._has_failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether the last step was a recorded one."""
        return self._replay is not None

    def __call__(
        self, tokens: Int[Tensor, "B"], state: list[Any]
    ) -> tuple[Float[Tensor, "B V"], list[Any]]:
        """Logits, valid until the next call, and the state after the tokens."""
        if state is not self._overwritten:
            self._replay = None
        elif self._replay is None:
            self._record(tokens, state)
        if self._replay is not None:
            self._tokens.copy_(tokens)
            self._replay()
            return self._logits, state
        logits, after = self._model.step(tokens, state, inplace=True)
        pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True)
        is_overwritten = all(old is new for old, new in pairs)
        can_be_one = is_overwritten and can_record(tokens) and not self._has_failed
        self._overwritten = after if can_be_one else None
        return logits, after

    def _record(self, tokens: Tensor, state: list[Any]) -> None:
        self._tokens = tokens.clone()
        try:
            self._logits, self._replay = record(
                lambda: self._model.step(self._tokens, state, inplace=True)[0]
            )
        except RuntimeError as error:
            # Such as a kind of one's own that waits for the GPU. Nothing was done yet.
            logger.warning("steps run one kernel at a time, without a CUDA graph: %s", error)
            self._has_failed = True


def can_record(tokens: Tensor) -> bool:
    return tokens.is_cuda


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """What `run` does to memory on the GPU, without doing it yet; its result has fixed memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay
