"""Whether this machine can hold a model at all, asked before it is built."""

import dataclasses
from collections.abc import Callable

import psutil
import torch

from longhaul.configs import ConfigError, RunConfig
from longhaul.configs.schema import TrainerConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import num_moments, parameter_groups
from longhaul.pipeline.system.devices import uses_gpu
from longhaul.pipeline.terminal.numbers import in_bytes

_WIDTH = 4  # bytes of a number in float32


def check_capacity(config: RunConfig) -> None:
    """Refuse a model whose weights, gradients and moments alone exceed this machine's memory.

    What else an update takes is `longhaul plan`'s to estimate: here, only what is certain counts.

    Raises:
        ConfigError: naming the bytes wanted and found; or there is no GPU, and one is asked for.
    """
    gpu = uses_gpu(config.trainer.accelerator)
    parameters = num_parameters(config.model)
    moments = _extrapolate(
        config.model, lambda model: num_moments(parameter_groups(model, config.optim))
    )
    wanted = _WIDTH * _numbers(config.trainer, parameters, moments, gpu)
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


def num_parameters(config: LanguageModelConfig) -> int:
    """Parameters of a model, if all its layers had the variant of most of them."""
    return _extrapolate(config, LanguageModel.num_parameters)


def _extrapolate(config: LanguageModelConfig, count: Callable[[LanguageModel], int]) -> int:
    """What is counted in a model, from models of one and of two layers.

    Many layers take long to build, even without memory.
    """
    one, two = (
        count(build_on_meta(dataclasses.replace(config, layers=layers, layer_attention={})))
        for layers in (1, 2)
    )
    return one + (config.layers - 1) * (two - one)


def _numbers(trainer: TrainerConfig, parameters: int, moments: int, gpu: bool) -> float:
    """Numbers in float32 that a rank holds: weights, gradients and moments."""
    if trainer.train_only is not None:
        return parameters
    ranks = trainer.world_size
    if trainer.strategy == "fsdp":
        return (2 * parameters + moments) * trainer.replicas / ranks
    if trainer.strategy != "deepspeed":
        return 2 * parameters + moments
    stage = trainer.deepspeed_stage
    is_elsewhere = trainer.offload_optimizer and gpu
    return (
        (0 if is_elsewhere else moments / ranks)
        + (parameters / ranks if stage > 1 else parameters)
        + (parameters / ranks if stage > 2 else parameters)
    ) / 2  # weights and gradients may be in 16 bits
