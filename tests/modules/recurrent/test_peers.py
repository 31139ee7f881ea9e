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
    """Our layer in float64 equals the peer, which computes in float32, and ours in float32.

    The errors of two layers in float32 may add up: on some processors those of KDA do, at an input
    whose gradient each of them has with an error of 7e-6.
    """
    x = torch.randn(2, T, D)
    probe = torch.randn_like(x)

    def results(layer: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = layer(leaf)
        y = y[0] if isinstance(y, tuple) else y
        (y * probe).sum().backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    others = results(peer, torch.float32), results(attention, torch.float32)
    exact = results(attention.double(), torch.float64)
    for other in others:
        for found, wanted in zip(other, exact, strict=True):
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
        "qkv.weight": torch.cat([q, k, v]), "output_gate.weight": z, "step_size.weight": dt,
        "convolution.weight": qkv(weights["conv1d.weight"]),
        "convolution.bias": qkv(weights["conv1d.bias"]),
        "time_step.A_log": weights["A_log"], "time_step.dt_bias": weights["dt_bias"],
        "skip": weights["D"], "output_norm.weight": weights["norm.weight"],
        "out.weight": weights["out_proj.weight"],
    }  # fmt: skip
    assert_equal(peer, build("mamba2", 4, 8, copied, key_dim=N, groups=groups))


@pytest.mark.parametrize("negative", [True, False])
def test_gated_deltanet_of_olmo_hybrid(negative: bool) -> None:
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    K, V = 6, 12
    config = OlmoHybridConfig(
        hidden_size=D, num_attention_heads=4, num_hidden_layers=2, linear_num_key_heads=4,
        linear_num_value_heads=4, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_allow_neg_eigval=negative,
    )  # fmt: skip
    peer = disturbed(OlmoHybridGatedDeltaNet(config, 0))
    weights = peer.state_dict()
    copied = {
        "qkv.weight": torch.cat([weights[f"{one}_proj.weight"] for one in "qkv"]),
        "convolution.weight": weights["conv1d.weight"],
        "output_gate.weight": weights["g_proj.weight"], "write.weight": weights["b_proj.weight"],
        "decay.weight": weights["a_proj.weight"], "time_step.A_log": weights["A_log"],
        "time_step.dt_bias": weights["dt_bias"], "output_norm.weight": weights["o_norm.weight"],
        "out.weight": weights["o_proj.weight"],
    }  # fmt: skip
    # Keys and values have their published widths: 3/4 of a head's, and twice that.
    assert_equal(peer, build("gated_deltanet", 4, 8, copied, negative_eigenvalues=negative))


def test_gated_deltanet_of_qwen3_next() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    K, V, G, H = 8, 8, 2, 4
    config = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=2, linear_num_key_heads=G, linear_num_value_heads=H,
        linear_key_head_dim=K, linear_value_head_dim=V, rms_norm_eps=1e-5,
    )  # fmt: skip
    peer = disturbed(Qwen3NextGatedDeltaNet(config, 0))
    weights = peer.state_dict()
    # Rows of a key head stand together: its query, key, and the values and gates of its heads.
    fused = weights["in_proj_qkvz.weight"].unflatten(0, (G, -1))
    q, k, v, z = (one.flatten(0, 1) for one in fused.split([K, K, H // G * V, H // G * V], dim=1))
    b, a = (
        one.flatten(0, 1)
        for one in weights["in_proj_ba.weight"].unflatten(0, (G, -1)).chunk(2, dim=1)
    )
    copied = {
        "qkv.weight": torch.cat([q, k, v]), "convolution.weight": weights["conv1d.weight"],
        "output_gate.weight": z, "write.weight": b, "decay.weight": a,
        "time_step.A_log": weights["A_log"], "time_step.dt_bias": weights["dt_bias"],
        "output_norm.weight": weights["norm.weight"], "out.weight": weights["out_proj.weight"],
    }  # fmt: skip
    assert_equal(peer, build("gated_deltanet", H, 8, copied, groups=G, key_dim=K, value_dim=V))


def test_kimi_delta() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=D, num_hidden_layers=2, linear_num_heads=4, linear_head_dim=8,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    peer = disturbed(KimiLinearDeltaAttention(config, 0))
    weights = peer.state_dict()
    copied = {
        "qkv.weight": torch.cat([weights[f"{one}_proj.weight"] for one in "qkv"]),
        "convolution.weight": weights["conv1d.weight"],
        "output_gate.0.weight": weights["g_a_proj.weight"],
        "output_gate.1.weight": weights["g_b_proj.weight"],
        "write.weight": weights["b_proj.weight"],
        "decay.down_weight": weights["forget_gate.f_a_proj.weight"],
        "decay.up_weight": weights["forget_gate.f_b_proj.weight"],
        "time_step.A_log": weights["forget_gate.A_log"].flatten(),
        "time_step.dt_bias": weights["forget_gate.dt_bias"],
        "output_norm.weight": weights["o_norm.weight"], "out.weight": weights["o_proj.weight"],
    }  # fmt: skip
    assert_equal(peer, build("kimi_delta", 4, 8, copied))
