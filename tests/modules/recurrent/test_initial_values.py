"""How the decays of state-space models begin, however a model is built."""

import math

import pytest
import torch
from torch import nn

from longhaul.modules.attention import LayerShape, attention_config
from longhaul.modules.attention.parts.time_step import TimeStep
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.modules.roles import parameter_roles

KINDS = {"gated_deltanet": (0.01, 16), "kimi_delta": (1, 16), "mamba2": (1, 16)}  # bounds of A


def config(kind: str) -> LanguageModelConfig:
    return LanguageModelConfig(
        attention=attention_config(kind)(), layers=2, width=64, heads=32, vocabulary=64
    )


def assert_in_range(model: nn.Module, kind: str, error: float = 1e-6) -> None:
    parts = [module for module in model.modules() if isinstance(module, TimeStep)]
    assert len(parts) == 2
    for part in parts:
        for value, (least, most) in (
            (part.A_log.double(), map(math.log, KINDS[kind])),
            (nn.functional.softplus(part.dt_bias.double()).log(), map(math.log, (1e-3, 0.1))),
        ):
            assert value.isfinite().all()
            assert least - error <= value.min() < value.max() <= most + error
            # Not all the same, and not near one end alone.
            assert value.max() - value.min() > 0.5 * min(most - least, 2)
    assert not torch.equal(parts[0].dt_bias, parts[1].dt_bias)


def test_the_rates_of_a_bounded_decay_begin_at_1() -> None:
    shape = LayerShape(width=8, heads=2, key_heads=2, head_dim=4)
    part = attention_config("kimi_delta")(decay_bound=5.0).build(shape).time_step
    torch.testing.assert_close(part.A_log, torch.zeros(2), rtol=0, atol=0)
    log_g = part(torch.zeros(1, 1, 8))[1]
    assert (
        log_g <= 5 * math.expm1(-1e-3) * 0.999
    ).all()  # sigmoid(dt_bias) is 1 - e^(-dt) for a step dt
    assert (log_g >= -5 * 0.1).all()
    assert (part(torch.full((1, 1, 8), 1e4))[1] == -5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_steps_begin_in_range(kind: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(config(kind))
    assert_in_range(model, kind)
    model.reset_parameters()
    assert_in_range(model, kind)
    # As planning on `meta` and strategies that materialise later do.
    with torch.device("meta"):
        late = LanguageModel(config(kind))
    late.to_empty(device="cpu")
    for module in late.modules():
        if isinstance(module, TimeStep):
            module.reset_parameters()
    assert_in_range(late, kind)
    late.load_state_dict(model.state_dict())
    assert_in_range(late, kind)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert_in_range(LanguageModel(config(kind)), kind, error=0.02)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_steps_and_convolutions_do_not_decay(kind: str) -> None:
    roles = parameter_roles(LanguageModel(config(kind)))
    names = [name for name in roles if name.endswith(("A_log", "dt_bias", "skip"))]
    names += [name for name in roles if ".convolution." in name or ".output_norm." in name]
    assert len(names) >= 2 * 4
    assert {roles[name] for name in names} == {"other"}
