"""The cost of keeping documents apart: each kind with and without bounds in its rows, in turns."""

import math

import torch
from torch import Tensor

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.benchmarks.bare_loop import synchronized_time

_LENGTHS = (16, 128)
"""Mean lengths of the documents, in tokens; each length is as likely as in texts cut at random."""

_ROUNDS = 7


def run(configs: dict[str, RunConfig]) -> None:
    """Print a table: forward and backward of a micro-batch of each config, by its row's name.

    The least of some rounds is compared, since other work on a machine only adds to a time.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = " | ".join(f"documents of {length}" for length in _LENGTHS)
    print(
        f"Time with bounds, of that of whole rows: least of {_ROUNDS} rounds, which take turns.\n\n"
        f"| kind | whole rows | {sizes} |\n|---|---|{'---|' * len(_LENGTHS)}"
    )
    for name, config in configs.items():
        whole, *others = _times(config, device)
        ratios = " | ".join(f"{other / whole:.3f}" for other in others)
        print(f"| `{name}` | {whole * 1e3:.4g} ms | {ratios} |", flush=True)


def _times(config: RunConfig, device: torch.device) -> list[float]:
    """Seconds with rows that are one document, and with documents of each length."""
    torch.manual_seed(0)
    model = LanguageModel(config.model).to(device)
    shape = (config.trainer.micro_batch, config.data.context)
    tokens, target = torch.randint(config.model.vocabulary, (2, *shape), device=device)
    bounds = [None, *(torch.rand(shape, device=device) < 1 / length for length in _LENGTHS)]
    least = [math.inf] * len(bounds)
    for _ in range(_ROUNDS):
        for index, is_first in enumerate(bounds):
            before = synchronized_time(device)
            _update(model, config, tokens, target, is_first)
            least[index] = min(least[index], synchronized_time(device) - before)
    return least


def _update(
    model: LanguageModel, config: RunConfig, tokens: Tensor, target: Tensor, is_first: Tensor | None
) -> None:
    is_half = config.trainer.precision == "bf16-mixed"
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=is_half):
        loss = model.loss(tokens, target, is_first=is_first)
    loss.backward()
    model.zero_grad()
