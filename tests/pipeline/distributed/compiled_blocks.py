"""Gradients of a model with compiled blocks, beside those of the same model without.

Not a test; tests start it as a process, since torch.compile cannot see through the checks of shapes
that pytest adds. Arguments: a backend of torch.compile, a number of batches whose rows hold
documents (0: one batch, of whole rows), and kinds of attention, each alone or with a slash and a
name of SHAPES. Prints a line of JSON for each.
"""

import json
import sys
from functools import partial

import torch
from torch._dynamo.utils import counters

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.distributed.blocks import Checkpointing, prepare_blocks

SHAPES = {
    "light": {},  # with activation checkpointing
    "llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 88},
    "gemma": {"norm": "rms_offset", "norm_order": "sandwich", "mlp": "geglu", "biases": ["qkv"]},
    "post": {"norm_order": "post", "mlp": "relu2", "parallel_residual": True, "biases": True},
    "grouped": {"heads": 4, "kv_heads": 2, "head_dim": 10, "qk_norm": "head"},
    "normed": {"heads": 4, "kv_heads": 1, "norm": "rms_offset", "qk_norm": "full"},
}


def compare(name: str, num_packed: int) -> dict[str, float]:
    kind, _, shape = name.partition("/")
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, **SHAPES.get(shape, {})}
    config = LanguageModelConfig(attention=attention_config(kind)(), **sizes)
    torch.manual_seed(0)
    plain, compiled = LanguageModel(config), LanguageModel(config)
    compiled.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    counters.clear()
    checkpointing: Checkpointing = "light" if shape == "light" else 0
    prepare_blocks(compiled, checkpointing=checkpointing, compiled=True)
    lost, moved = 0.0, [0.0]
    for number in range(max(1, num_packed)):
        tokens, target = torch.randint(64, (2, 2, 96))
        # From no document but the rows to documents of two tokens.
        is_first = torch.rand(2, 96) < number / (2 * num_packed) if num_packed else None
        losses = [model.loss(tokens, target, is_first=is_first) for model in (plain, compiled)]
        for model, loss in zip((plain, compiled), losses, strict=True):
            model.zero_grad()
            loss.backward()
        pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
        off = [(a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None]
        lost = max(lost, abs(losses[0] - losses[1]).item())
        moved = [max(pair) for pair in zip(off, moved if number else off, strict=True)]
    return {
        "loss": lost,
        "gradient": max(moved),
        "gradients": len(moved),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "compiled": sum(counters["inductor"].values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend, num_packed, *names = sys.argv[1:]
    torch.compile = partial(torch.compile, backend=backend)
    for name in names:
        print(json.dumps(compare(name, int(num_packed))))
