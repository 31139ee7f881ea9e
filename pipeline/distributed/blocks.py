"""Applies compilation, activation checkpointing and FSDP2 to the blocks of a model."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from longhaul.modules.attention.base import InFloat32
from longhaul.modules.language_model import LanguageModel


def prepare_blocks(model: LanguageModel, *, checkpoint_every: int, compiled: bool) -> None:
    """Compile the blocks, and checkpoint the activations of some; results do not change.

    Each block's `forward` is replaced, not the module. So parameters keep their names, and the
    hooks by which FSDP2 gathers parameters run outside the compiled function.

    Args:
        model: its blocks are changed in place.
        checkpoint_every: every n-th block keeps only its input for the backward pass, which
            computes the block again. 0 for none.
        compiled: whether to compile each block.
    """
    if compiled:
        # Under DDP it would cut each block's graph where a bucket of gradients ends, so that they
        # are sent early. Blocks are such cuts already.
        torch._dynamo.config.optimize_ddp = False
    for number, block in enumerate(model.blocks):
        forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if checkpoint_every and number % checkpoint_every == 0:
            # Blocks draw no random numbers, so no RNG state is preserved.
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = forward


def shard(model: LanguageModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2: each block is one unit of sharding, and embedding and final norm are another.

    Under a policy with a lower precision, the few modules of a block that must stay in float32 are
    a unit of their own. In a compiled block there is a graph break at each of them.
    """
    for block in model.blocks:
        in_float32: list[nn.Module] = [m for m in block.modules() if isinstance(m, InFloat32)]
        if in_float32 and policy.param_dtype is not None:
            fully_shard(in_float32, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The root stays gathered after its forward, because the loss needs the embedding once more.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Training calls this method in place of `forward`, which would hold all logits.
    register_fsdp_forward_method(model, "activations")
