"""Bytes that the elementwise operations of a block of the 124M model move.

    python docs/scripts/elementwise_bytes.py [KIND] [TOKENS]

Counts inputs and outputs of every operation, forward and backward in bfloat16, of a micro-batch of
32,768 tokens on a CPU, times 12 blocks. Matrix products and the op are left out; rotations are
counted as their Triton kernels. Then the same of a compiled block: inputs and outputs of what
torch's compiler has fused, as it fuses for a CPU, rotations included.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhaul.kernels.rotary import op as rotary
from longhaul.kernels.rotary import triton as rotary_kernels
from longhaul.modules.attention import attention_config
from longhaul.modules.block import Block
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


def one_block(kind: str) -> Block:
    options = {"degree": 2} if "sympow" in kind else {}
    model = LanguageModel(
        LanguageModelConfig(
            attention=attention_config(kind)(**options),
            layers=1, width=768, heads=12, vocabulary=50_304,
        )
    )  # fmt: skip
    return model.blocks[0]  # type: ignore[return-value]


def inputs(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The input of a block, and the gradient of its output."""
    shape = batch, tokens, 768
    return torch.randn(shape, requires_grad=True), torch.randn(shape)


def run(forward: Callable[..., tuple[Tensor, Any]], x: Tensor, gradient: Tensor) -> None:
    """Forward and backward in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = forward(x, keep_state=False)
    y.backward(gradient)


def count(kind: str, tokens: int) -> Counted:
    block, given = one_block(kind), inputs(_TOKENS // tokens, tokens)
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
        counted,
    ):
        run(block, *given)
    return counted


def count_compiled(kind: str, batch: int, tokens: int) -> int:
    """Bytes that the fused operations of a compiled block move, without products and the op."""
    total = 0
    codegen = GraphLowering.codegen

    def counting(graph: GraphLowering) -> Any:
        nonlocal total
        done = codegen(graph)
        total += sum(
            node.get_read_write_buffers_sizes()
            for node in graph.scheduler.nodes
            if not isinstance(node, ExternKernelSchedulerNode)
        )
        return done

    torch._dynamo.reset()
    with (
        patch.object(GraphLowering, "codegen", counting),
        inductor.patch(force_disable_caches=True),  # what a cache holds is not generated again
    ):
        run(torch.compile(one_block(kind).forward, dynamic=False), *inputs(batch, tokens))
    return total


def extrapolated(kind: str) -> float:
    """The same of a whole micro-batch. Weights and tokens have bytes of their own, which add up."""
    one, two = (count_compiled(kind, batch, 512) for batch in (1, 2))
    return one + (two - one) * (_TOKENS / 512 - 1)


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
    print(f"compiled: {extrapolated(kind) * scale:.0f} GB")


if __name__ == "__main__":
    main(*sys.argv[1:])
