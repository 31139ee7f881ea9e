"""What is done to a model's blocks before a strategy takes them, without changing their results."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from longhaul.modules.language_model import LanguageModel


def prepare_blocks(model: LanguageModel, *, checkpoint_every: int, compiled: bool) -> None:
    """Compile each block, and let every n-th keep its input alone until the backward pass.

    Their forwards are replaced, not the modules: parameters keep their names, and the hooks by
    which a strategy gathers them stay outside.
    """
    for number, block in enumerate(model.blocks):
        forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if checkpoint_every and number % checkpoint_every == 0:
            # Nothing in a block draws random numbers.
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = forward
