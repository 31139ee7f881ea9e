"""Whether this machine can hold a model at all, asked before it is built."""

import dataclasses

import psutil
import torch

from longhaul.configs import ConfigError, RunConfig
from longhaul.modules.language_model import LanguageModelConfig
from longhaul.pipeline.planning.sizes import build_on_meta
from longhaul.pipeline.system.devices import uses_gpu
from longhaul.pipeline.terminal.numbers import in_bytes

# Bytes per parameter in float32; there are two moments.
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, 8


def check_capacity(config: RunConfig) -> None:
    """Refuse a model whose weights, gradients and moments alone exceed this machine's memory.

    What else an update takes is `longhaul plan`'s to estimate: here, only what is certain counts.

    Raises:
        ConfigError: naming the bytes wanted and found; or there is no GPU, and one is asked for.
    """
    gpu = uses_gpu(config.trainer.accelerator)
    parameters = num_parameters(config.model)
    wanted = parameters * _bytes_per_parameter(config, gpu)
    if gpu:
        found, where = torch.cuda.get_device_properties(0).total_memory, "a GPU of this machine"
    else:
        wanted *= config.trainer.devices
        found, where = psutil.virtual_memory().total, "this machine"
    if wanted > found:
        raise ConfigError(
            f"model.width and model.layers: found {parameters:,} parameters, whose weights, "
            f"gradients and moments take {in_bytes(wanted)}, wanted at most {in_bytes(found)}, the "
            f"memory of {where}"
        )


def num_parameters(model: LanguageModelConfig) -> int:
    """Parameters of a model, if all its layers had the variant of most of them.

    From models of one and of two layers, since even without memory, many layers take long to build.
    """
    one, two = (
        build_on_meta(
            dataclasses.replace(model, layers=layers, layer_attention={})
        ).num_parameters()
        for layers in (1, 2)
    )
    return one + (model.layers - 1) * (two - one)


def _bytes_per_parameter(config: RunConfig, gpu: bool) -> float:
    """Bytes of a rank for each of the model's parameters."""
    trainer = config.trainer
    if trainer.train_only is not None:
        return _WEIGHT
    ranks = trainer.world_size
    if trainer.strategy == "fsdp":
        return (_WEIGHT + _GRADIENT + _MOMENTS) * trainer.replicas / ranks
    if trainer.strategy != "deepspeed":
        return _WEIGHT + _GRADIENT + _MOMENTS
    stage = trainer.deepspeed_stage
    is_elsewhere = trainer.offload_optimizer and gpu
    return (
        (0 if is_elsewhere else _MOMENTS / ranks)
        + (_GRADIENT / ranks if stage > 1 else _GRADIENT)
        + (_WEIGHT / ranks if stage > 2 else _WEIGHT)
    ) / 2  # weights and gradients may be in 16 bits
