"""Bytes that the elementwise operations of a block of the 124M model move, in eager mode.

    python docs/scripts/elementwise_bytes.py [KIND] [TOKENS]

Counts inputs and outputs of every operation, forward and backward in bfloat16, of a micro-batch of
32,768 tokens on a CPU, times 12 blocks. Matrix products and the op are left out; rotations are
counted as their Triton kernels.
"""

import sys
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhaul.kernels.rotary import op as rotary
from longhaul.kernels.rotary import triton as rotary_kernels
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig

_BLOCKS, _TOKENS = 12, 32_768
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "power_forward", "power_backward")


class Counted(TorchDispatchMode):
    """Bytes and calls of each operation that is no view and allocates no more than it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, name: str, *tensors: Tensor) -> None:
        different = {id(x): x for x in tensors}.values()
        self.bytes[name] += sum(x.numel() * x.element_size() for x in different)
        self.calls[name] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if not (function.is_view or "empty" in name or name in ("detach", "_unsafe_view")):
            given, made = tree_leaves((args, kwargs)), tree_leaves(result)
            self.add(name, *(x for x in [*given, *made] if isinstance(x, Tensor)))
            if name.endswith("_"):  # read as well as written
                self.bytes[name] += args[0].numel() * args[0].element_size()
        return result


def count(kind: str, tokens: int) -> Counted:
    options = {"degree": 2} if "sympow" in kind else {}
    model = LanguageModel(
        LanguageModelConfig(
            attention=attention_config(kind)(**options),
            layers=1, width=768, heads=12, vocabulary=50_304,
        )
    )  # fmt: skip
    shape = _TOKENS // tokens, tokens, 768
    x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
    counted = Counted()

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = torch.empty_like(x)
        counted.add("rotate", x, cos, sin, y)
        return y

    def gradients(dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        made = [torch.empty_like(like) for like in (x, cos, sin)]
        counted.add("rotate, backward", dy, x, cos, sin, *made)
        return made

    with (
        patch.object(rotary, "uses_triton", lambda backend, device, why_not: True),
        patch.object(rotary_kernels, "rotated", rotated),
        patch.object(rotary_kernels, "gradients", gradients),
        torch.autocast("cpu", torch.bfloat16),
        counted,
    ):
        y, _ = model.blocks[0](x, keep_state=False)
        y.backward(gradient)
    return counted


def main(kind: str = "conformal_sympow", tokens: str = "4096") -> None:
    counted = count(kind, int(tokens))
    scale = _BLOCKS / 1e9
    total = 0.0
    for name, size in counted.bytes.most_common():
        if name not in _PRODUCTS:
            total += size * scale
            print(f"{name:32} {size * scale:8.2f} GB in {counted.calls[name]} calls a block")
    calls = counted.calls.total()
    print(f"{kind}, 12 blocks, {_TOKENS:,} tokens: {total:.0f} GB, {calls} calls a block")


if __name__ == "__main__":
    main(*sys.argv[1:])
