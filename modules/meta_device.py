"""Models without weights: their parameters have shapes, but no numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig


def build_on_meta(config: LanguageModelConfig) -> LanguageModel:
    """The model on the meta device, whatever its size."""
    with on_meta():
        return LanguageModel(config)


@contextmanager
def on_meta() -> Iterator[None]:
    """Builds modules on the meta device, in milliseconds and without memory."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Draws no weights: there are none, but torch would import its compiler to find that."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
