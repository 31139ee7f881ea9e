"""An update of a model with compiled blocks, beside one of the same model without.

Not a test; tests start it as a process, since torch.compile cannot see through the checks of shapes
that pytest adds. Arguments: a backend of torch.compile, and kinds of attention. Prints a line of
JSON for each kind.
"""

import json
import sys
from functools import partial

import torch
from torch._dynamo.utils import counters

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.pipeline.distributed.blocks import prepare_blocks


def compare(kind: str) -> dict[str, float]:
    attention = attention_config(kind)()
    config = LanguageModelConfig(layers=2, width=32, heads=2, vocabulary=64, attention=attention)
    torch.manual_seed(0)
    plain, compiled = LanguageModel(config), LanguageModel(config)
    compiled.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    counters.clear()
    prepare_blocks(compiled, checkpoint_every=0, compiled=True)
    tokens, target = torch.randint(64, (2, 2, 96))
    losses = [model.loss(tokens, target) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    moved = [(one.grad - other.grad).abs().max() for one, other in pairs if one.grad is not None]
    return {
        "loss": abs(losses[0] - losses[1]).item(),
        "gradient": max(moved).item(),
        "gradients": len(moved),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "compiled": sum(counters["inductor"].values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend, *kinds = sys.argv[1:]
    torch.compile = partial(torch.compile, backend=backend)
    for kind in kinds:
        print(json.dumps(compare(kind)))
