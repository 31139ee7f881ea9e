"""Initialisations by name: the standard deviation of every matrix, and how it is drawn."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn

Initialisation = Literal["gpt2", "normal", "olmo", "llama", "nanochat"]


class _Draw(NamedTuple):
    std: float
    form: Literal["normal", "cut", "uniform"] = "normal"  # cut: at three standard deviations


# A matrix is named by its module: `embedding`, `lm_head`, or one of a block, of which `out` adds to
# the residual stream. L is the number of layers, D the width.


def _gpt2(name: str, L: int, D: int) -> _Draw:
    return _Draw(0.02 / math.sqrt(2 * L) if name.endswith(".out") else 0.02)


def _normal(name: str, L: int, D: int) -> _Draw:
    return _Draw(0.02)


def _olmo(name: str, L: int, D: int) -> _Draw:
    return _Draw(0.02, "cut")


def _llama(name: str, L: int, D: int) -> _Draw:
    """Of torchtitan's Llama 3, where not only what adds to the stream is smaller, but `up` too."""
    if name == "embedding":
        return _Draw(1.0)
    if name == "lm_head":
        return _Draw(1 / math.sqrt(D), "cut")
    is_small = name.endswith((".out", ".mlp.up"))
    return _Draw(0.02 / math.sqrt(2 * (_layer(name) + 1)) if is_small else 0.02)


def _nanochat(name: str, L: int, D: int) -> _Draw:
    if name == "embedding":
        return _Draw(0.8)
    if name == "lm_head":
        return _Draw(0.001)
    if name.endswith(".out"):
        return _Draw(0.0)
    is_small = name.endswith((".mlp.up", ".mlp.gate"))
    return _Draw((0.4 if is_small else 1.0) / math.sqrt(D), "uniform")


_SCHEMES: Mapping[str, Callable[[str, int, int], _Draw]] = {
    "gpt2": _gpt2,
    "normal": _normal,
    "olmo": _olmo,
    "llama": _llama,
    "nanochat": _nanochat,
}


def initialise(
    model: nn.Module, initialisation: Initialisation, *, layers: int, width: int, is_tied: bool
) -> None:
    """Draw the embedding and the weight of every `nn.Linear` anew, in place.

    An embedding that is also the head's matrix is drawn as that of a head: the scale of logits
    matters more than that of what the first norm reads.
    """
    scheme = _SCHEMES[initialisation]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _draw(module.weight, scheme(name, layers, width))
    embedding = model.get_parameter("embedding.weight")
    _draw(embedding, scheme("lm_head" if is_tied else "embedding", layers, width))


def _draw(weight: Tensor, draw: _Draw) -> None:
    if draw.form == "normal":
        nn.init.normal_(weight, std=draw.std)
    elif draw.form == "cut":
        nn.init.trunc_normal_(weight, std=draw.std, a=-3 * draw.std, b=3 * draw.std)
    else:
        bound = math.sqrt(3) * draw.std
        nn.init.uniform_(weight, -bound, bound)


def _layer(name: str) -> int:
    """The number in `blocks.NUMBER.…`."""
    return int(name.split(".")[1])
