"""What is done to a model block by block, without changing its results."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from longhaul.modules.attention.base import InFloat32
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


def shard(model: LanguageModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """FSDP2: every block is gathered by itself, and embedding and norms with the whole model.

    Under a policy that rounds, a block's few weights that are not to be rounded are gathered by
    themselves; where blocks are compiled, a graph ends at each of them.
    """
    for block in model.blocks:
        exact: list[nn.Module] = [part for part in block.modules() if isinstance(part, InFloat32)]
        if exact and policy.param_dtype is not None:
            fully_shard(exact, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The root keeps the embedding after its forward, since the loss needs it once more.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
