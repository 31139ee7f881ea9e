"""Layers against those of transformers with the same weights, outputs and every gradient."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longhaul.modules.attention import Attention, LayerShape, attention_config

D, T = 32, 41
Copied = Mapping[str, Tensor]


def disturbed(layer: nn.Module) -> nn.Module:
    """With weights that all matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def build(kind: str, heads: int, head_dim: int, weights: Copied, **options: Any) -> Attention:
    shape = LayerShape(width=D, heads=heads, key_heads=heads, head_dim=head_dim)
    attention = attention_config(kind)(**options).build(shape)
    missing, unknown = attention.load_state_dict(dict(weights), strict=False)
    assert not missing
    assert not unknown
    return attention


def assert_equal(peer: nn.Module, attention: Attention) -> None:
    x = torch.randn(2, T, D)
    probe = torch.randn_like(x)
    results = []
    for layer in (peer, attention):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y = y[0] if isinstance(y, tuple) else y
        (y * probe).sum().backward()
        results.append((y.detach(), leaf.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2(groups: int) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    N, heads = 12, 8
    config = Mamba2Config(
        hidden_size=D, num_heads=heads, head_dim=8, state_size=N, n_groups=groups, expand=2,
        chunk_size=16, num_hidden_layers=1,
    )  # fmt: skip
    peer = disturbed(Mamba2Mixer(config, 0))
    weights = peer.state_dict()
    z, v, k, q, dt = weights["in_proj.weight"].split([2 * D, 2 * D, N * groups, N * groups, heads])

    def qkv(x: Tensor) -> Tensor:
        v, k, q = x.split([2 * D, N * groups, N * groups])
        return torch.cat([q, k, v])

    copied = {
        "qkv.weight": torch.cat([q, k, v]), "gate.weight": z, "step_size.weight": dt,
        "convolution.weight": qkv(weights["conv1d.weight"]),
        "convolution.bias": qkv(weights["conv1d.bias"]),
        "time_step.A_log": weights["A_log"], "time_step.dt_bias": weights["dt_bias"],
        "skip": weights["D"], "output_norm.weight": weights["norm.weight"],
        "out.weight": weights["out_proj.weight"],
    }  # fmt: skip
    assert_equal(peer, build("mamba2", 4, 8, copied, key_dim=N, groups=groups))
