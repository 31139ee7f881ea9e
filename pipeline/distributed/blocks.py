"""Applies compilation, activation checkpointing and FSDP2 to the blocks of a model."""

from functools import partial
from typing import Any, Literal

import torch
from torch._ops import OpOverload  # torch has no public name for it yet
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from longhaul.configs.schema import TrainerConfig
from longhaul.kernels.common.custom_ops import NAMESPACE
from longhaul.modules.attention.base import float32_weights
from longhaul.modules.language_model import LanguageModel

Checkpointing = int | Literal["light"]
"""As trainer.activation_checkpointing."""

# Matrix products and attention, whose FLOPs torch counts. It has no formula for attention on a CPU.
_PRODUCTS = {*flop_registry, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu}


def prepare_blocks(model: LanguageModel, *, checkpointing: Checkpointing, compiled: bool) -> None:
    """Compile the blocks, and checkpoint the activations of some; results do not change.

    Each block's `forward` is replaced, not the module. So parameters keep their names, and the
    hooks by which FSDP2 gathers parameters run outside the compiled function.

    Args:
        model: its blocks are changed in place.
        checkpointing: n: every n-th block keeps only its input for the backward pass, which
            computes the block again. "light": every block also keeps the results of its products
            and its attention, and computes all else again. 0: neither.
        compiled: whether to compile each block.
    """
    if compiled:
        # Under DDP it would cut each block's graph where a bucket of gradients ends, so that they
        # are sent early. Blocks are such cuts already.
        torch._dynamo.config.optimize_ddp = False
    for number, block in enumerate(model.blocks):
        forward = block.forward
        # Blocks draw no random numbers, so no RNG state is preserved.
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if checkpointing == "light":
            # Before compilation: from outside, the ops of a compiled function are not visible.
            context = partial(create_selective_checkpoint_contexts, _policy)
            forward = partial(recomputed, forward, context_fn=context)
        if compiled:
            forward = torch.compile(forward)
        if isinstance(checkpointing, int) and checkpointing and number % checkpointing == 0:
            forward = partial(recomputed, forward)
        block.forward = forward


def _policy(_: Any, op: Any, *_args: Any, **_settings: Any) -> CheckpointPolicy:
    """Whether `light` keeps the results of an op. All custom ops of ours are products.

    What an op writes into an argument, as one in a user's kind may, must be written again.
    """
    is_product = op.namespace == NAMESPACE or getattr(op, "overloadpacket", op) in _PRODUCTS
    if is_product and not (isinstance(op, OpOverload) and op._schema.is_mutable):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def shard_as_configured(model: LanguageModel, trainer: TrainerConfig, device_type: str) -> None:
    """Apply FSDP2 over all ranks, with the replicas and the precision of the config."""
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        # Inputs are not cast, because the residual stream between the blocks is float32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    ranks, replicas = trainer.world_size, num_replicas(trainer, model.num_parameters())
    shard(model, device_mesh(device_type, ranks, replicas), policy)


def num_replicas(trainer: TrainerConfig, parameters: int) -> int:
    """Groups of ranks that each hold the whole model of so many parameters."""
    is_small = parameters < trainer.no_shard_below
    return trainer.world_size if is_small else trainer.replicas


def device_mesh(device_type: str, ranks: int, replicas: int) -> DeviceMesh:
    """A mesh (shard,) of all ranks, or with several replicas (replicate, shard).

    One dimension of all ranks is the default process group; a second one is a group more, over
    which FSDP2 would reduce the gradients again.
    """
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device_type, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard")
    )


def shard(model: LanguageModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2: each block is one unit of sharding, and embedding and final norm are another.

    Under a policy with a lower precision, the weights that must stay in float32, which are few, are
    one unit of all blocks. It is gathered before the first block and kept, so that each block is
    compiled as one graph: gathering inside of a block would cut it.
    """
    if policy.param_dtype is not None and (float32 := float32_weights(model.blocks)):
        others = set(model.blocks.parameters()) - float32
        # Before the blocks, because fully_shard skips modules that are sharded already.
        fully_shard(model.blocks, mesh=mesh, reshard_after_forward=False, ignored_params=others)
    for block in model.blocks:
        # Looked for again, because sharding has replaced them.
        ignored = float32_weights(block) if policy.param_dtype is not None else None
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    # The root stays gathered after its forward, because the loss needs the embedding once more.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Training calls this method in place of `forward`, which would hold all logits.
    register_fsdp_forward_method(model, "activations")
