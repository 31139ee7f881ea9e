"""The language model: losses, memory, decoding, and layers of different variants."""

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.attention.power import PowerConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.rotary import PositionScaling

PEAK_OF_A_LONG_LOSS = """
import resource, sys, torch
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
attention = attention_config("sympow")()
model = LanguageModel(
    LanguageModelConfig(attention=attention, layers=1, width=16, heads=1, vocabulary=50_304)
)
T = int(sys.argv[1])
tokens = torch.zeros(1, T, dtype=torch.int64)
hidden = torch.randn(1, T, 16, requires_grad=True)
model.activations = lambda tokens, state=None, **options: (hidden, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = model.loss(tokens, tokens)
loss.backward()
assert hidden.grad.isfinite().all() and model.embedding.weight.grad is not None
model.token_losses(tokens, tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def is_power(kind: str) -> bool:
    return issubclass(attention_config(kind), PowerConfig)


def small(kind: str = "conformal_sympow", **shape: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = attention_config(kind)()
    return LanguageModel(
        LanguageModelConfig(
            layers=2, width=32, heads=2, vocabulary=64, attention=attention, **shape
        )
    )


NEOX = {"embedding_norm": False, "parallel_residual": True, "biases": True, "tied_head": False}


def small_neox(kind: str = "softmax") -> LanguageModel:
    """The shape of GPT-NeoX, with biases that are not zero, and weights that all matter."""
    model = small(kind, **NEOX).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.wide
@pytest.mark.parametrize("T", [8192, pytest.param(65_536, marks=pytest.mark.soak)])
def test_the_loss_of_many_tokens_never_stores_all_logits(T: int) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", PEAK_OF_A_LONG_LOSS, str(T)],
        check=True,
        capture_output=True,
        text=True,
    )
    peak = int(result.stdout)
    print(f"peak of loss, backward and token losses: {peak / 2**20:.0f} MiB")
    # The logits alone would take 1.6 GB, or 13 GB in the longer case.
    assert peak < 1 << 30


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = small().double()
    tokens, target = torch.randint(64, (2, 3, 40)).unbind(0)
    hidden, _ = model.activations(tokens)
    logits = hidden @ model.embedding.weight.T
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    parameters = list(model.parameters())
    wanted_gradients = torch.autograd.grad(wanted, parameters)
    loss = model.loss(tokens, target)
    torch.testing.assert_close(loss, wanted)
    for one, other in zip(torch.autograd.grad(loss, parameters), wanted_gradients, strict=True):
        torch.testing.assert_close(one, other)
    losses, _ = small().token_losses(tokens, target)
    torch.testing.assert_close(losses.double().mean(), wanted, rtol=1e-5, atol=1e-5)


def test_the_loss_in_bf16_is_a_mean_in_float32() -> None:
    model = small()
    tokens, target = torch.randint(64, (2, 7, 301)).unbind(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens, target)
        losses, _ = model.token_losses(tokens, target)
    assert loss.dtype == torch.float32
    # Rounding to bf16 would change it by up to 0.008.
    torch.testing.assert_close(loss, losses.mean(), rtol=0, atol=5e-4)


def test_a_new_model_has_the_loss_of_uniform_guesses() -> None:
    tokens = torch.randint(64, (2, 50))
    target = torch.randint(64, (2, 50))
    assert small().loss(tokens, target).item() == pytest.approx(math.log(64), rel=0.02)


@pytest.mark.parametrize("kind", registered_variants())
def test_prefill_and_steps_equal_one_forward_pass(kind: str) -> None:
    model = small(kind).double().eval()
    tokens = torch.randint(64, (2, 30))
    hidden, _ = model.activations(tokens)
    wanted = model(tokens)
    torch.testing.assert_close(wanted, hidden @ model.embedding.weight.T)
    logits, state = model.prefill(tokens[:, :20])
    torch.testing.assert_close(logits, wanted[:, 19])
    for t in range(20, 30):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, wanted[:, t])


def test_token_losses_continue_from_a_state() -> None:
    model = small().double()
    tokens, target = torch.randint(64, (2, 2, 50)).unbind(0)
    whole, _ = model.token_losses(tokens, target)
    first, state = model.token_losses(tokens[:, :21], target[:, :21], keep_state=True)
    second, _ = model.token_losses(tokens[:, 21:], target[:, 21:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def test_autocast_reaches_the_loss() -> None:
    model = small()
    tokens = torch.randint(64, (2, 50))
    exact = model.loss(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.loss(tokens, tokens)
    rounded.backward()
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_residual_projections_start_smaller() -> None:
    block = small().blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for layer in (block.mlp.out, block.attention.out):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "model.kv_heads: found 3, wanted a divisor of model.heads = 4"),
        ({"kv_heads": 0}, "model.kv_heads: found 0, wanted 1 or more"),
        ({"head_dim": 7}, "model.head_dim: found 7, wanted an even number"),
        ({"learned_positions": 0}, "model.learned_positions: found 0, wanted 1 or more"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    shape = {"layers": 1, "width": 24, "heads": 4} | options
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        LanguageModelConfig(attention=attention_config("softmax")(), **shape)


def test_grouped_heads_of_any_width_count_as_they_should() -> None:
    shape = LanguageModelConfig(
        attention=attention_config("softmax")(window=100),
        layers=1, width=24, heads=4, kv_heads=2, head_dim=10, qk_norm="head", vocabulary=64,
    )  # fmt: skip
    model = LanguageModel(shape)
    projections = 24 * (40 + 20 + 20) + 40 * 24
    assert model.num_parameters() == projections + 2 * 10 + 24 * (64 + 8 * 24 + 4)
    assert model.weight_flops() == 2 * (projections + 24 * (64 + 8 * 24))
    pairs = 100 * 101 // 2 + 400 * 100
    assert model.mixing_flops(500) == 4 * pairs * 40 // 500
    attention = model.blocks[0].attention
    assert attention.allocated_bytes(500, torch.bfloat16) == 2 * 99 * 2 * 2 * 10 + 8


def test_parameters_and_flops_match_the_formulas() -> None:
    D, L, vocabulary = 32, 2, 64
    model = small("softmax")
    assert model.num_parameters() == vocabulary * D + L * (12 * D * D + 2 * D) + 2 * D
    context = 100
    mixing = 2 * (context + 1) * D
    assert model.flops_per_token(context) == 2 * vocabulary * D + L * (24 * D * D + mixing)
    assert model.mixing_flops(context) == L * mixing
    assert model.weight_flops() == model.flops_per_token(context) - L * mixing


def test_a_model_of_the_shape_of_gpt_neox_computes_what_gpt_neox_does() -> None:
    """Written out from its definition (arXiv:2204.06745, section 2.1), in float64."""
    model, heads = small_neox(), 2
    w = dict(model.named_parameters())
    tokens = torch.randint(64, (3, 20))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        """(B, H, T, K), each of whose pairs j, j + K / 2 is rotated by its position."""
        half = x.shape[-1] // 2
        theta = 10_000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    x = w["embedding.weight"][tokens]
    for layer in ("blocks.0", "blocks.1"):
        projected = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv")
        q, k, v = (
            one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in projected.chunk(3, dim=-1)
        )
        scores = turned(q) @ turned(k).mT / math.sqrt(q.shape[-1])
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        attention = linear(mixed.transpose(1, 2).flatten(2), f"{layer}.attention.out")
        inner = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        cubic = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
        x = x + attention + linear(inner / 2 * (1 + cubic.tanh()), f"{layer}.mlp.out")
    logits = norm(x, "final_norm") @ w["lm_head.weight"].T
    torch.testing.assert_close(model(tokens), logits)
    wanted = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss = model.loss(tokens, tokens)
    torch.testing.assert_close(loss, wanted)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters)
    for name, one, other in zip(w, *gradients, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["softmax", "coca", "alibi", "conformal_sympow", "zeros"])
def test_in_the_shape_of_gpt_neox_prefill_and_steps_equal_one_forward_pass(kind: str) -> None:
    model = small_neox(kind)
    tokens = torch.randint(64, (2, 30))
    wanted = model(tokens)
    logits, state = model.prefill(tokens[:, :20])
    torch.testing.assert_close(logits, wanted[:, 19])
    for t in range(20, 30):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, wanted[:, t])


@pytest.mark.parametrize("kind", registered_variants())
def test_every_projection_gets_a_bias_of_zeros(kind: str) -> None:
    model = small(kind, biases=True)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linear) >= 2 * 4
    for module in linear:
        assert torch.equal(module.bias, torch.zeros(module.out_features))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert all(module.bias is not None for module in norms)
    plain = small(kind)
    assert model.weight_flops() == plain.weight_flops()
    assert model.mixing_flops(20) == plain.mixing_flops(20)


def test_the_shape_of_gpt_neox_starts_and_counts_as_it_should() -> None:
    D, L, vocabulary = 32, 2, 64
    model = small("softmax", **NEOX)
    tokens, target = torch.randint(64, (2, 2, 50)).unbind(0)
    assert model.loss(tokens, target).item() == pytest.approx(math.log(64), rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    biases = (3 + 1 + 4 + 1) * D
    block = 12 * D * D + biases + 2 * 2 * D
    assert model.num_parameters() == 2 * vocabulary * D + L * block + 2 * D
    assert model.weight_flops() == 2 * vocabulary * D + L * 24 * D * D


def hybrid() -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        layers=4,
        width=32,
        heads=2,
        vocabulary=64,
        attention=attention_config("conformal_sympow")(),
        layer_attention={"1::2": attention_config("softmax")()},
    )
    return LanguageModel(config)


def test_a_hybrid_is_built_from_the_kinds_of_its_layers() -> None:
    model = hybrid().double().eval()
    kinds = [block.attention.config.kind for block in model.blocks]
    assert kinds == ["conformal_sympow", "softmax"] * 2
    tokens = torch.randint(64, (2, 30))
    hidden, _ = model.activations(tokens)
    wanted = hidden @ model.embedding.weight.T
    logits, state = model.prefill(tokens[:, :20])
    for t in range(20, 30):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, wanted[:, t])
    assert model.flops_per_token(100) == model.weight_flops() + model.mixing_flops(100)
    assert model.mixing_flops(100) == sum(b.attention.mixing_flops(100) for b in model.blocks)


def test_position_scaling_reaches_every_layer_or_is_refused() -> None:
    model = hybrid().double().eval()
    tokens = torch.randint(64, (2, 30))
    plain = model(tokens)
    model.set_positions(PositionScaling(name="linear", factor=2.0))
    for block in model.blocks:
        assert block.attention.rotary.scaling.factor == 2
    assert not torch.allclose(model(tokens), plain)
    model.set_positions(PositionScaling())
    assert torch.equal(model(tokens), plain)
    with pytest.raises(ValueError, match="positions: found 'linear' for attention of kind alibi"):
        small("alibi").set_positions(PositionScaling(name="linear", factor=2.0))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("conformal_sympow", "zeros") else pytest.mark.wide)
        for kind in filter(is_power, registered_variants())
    ],
)
def test_a_learned_initial_state_alone_lowers_the_loss_on_unseen_documents(kind: str) -> None:
    # The targets of the first tokens cannot be learned from earlier tokens, only from the state.
    plain = small(kind)
    attention = attention_config(kind)(initial_state="learned", rank=4)
    model = LanguageModel(dataclasses.replace(plain.config, attention=attention))
    model.load_state_dict(plain.state_dict(), strict=False)
    model.requires_grad_(False)
    learned = [p for name, p in model.named_parameters() if "initial_state" in name.split(".")]
    optimizer = torch.optim.Adam([p.requires_grad_() for p in learned], lr=0.03)
    tokens, target = torch.randint(2, (16, 12)), torch.randint(64, (16, 12))
    target[:, :6] = 20 + tokens[:, :6]
    seen, unseen = (tokens[:8], target[:8]), (tokens[8:], target[8:])
    before = plain.loss(*unseen).item()
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(*seen).backward()
        optimizer.step()
    assert model.loss(*unseen).item() < before - 0.01


def test_learned_positions_are_added_to_the_embedding() -> None:
    model, tokens = placed(), torch.randint(64, (2, 30))
    wanted = [model.embedding(tokens) + model.positions.weight[:30]]
    wanted.append(model.embedding_norm(wanted[0]))
    for block in model.blocks:
        wanted.append(block(wanted[-1], keep_state=False)[0])
    torch.testing.assert_close(model.activations(tokens)[0], model.final_norm(wanted[-1]))
    is_first = torch.zeros(2, 30, dtype=torch.bool)
    is_first[:, [0, 1, 13]] = True
    packed, _ = model.activations(tokens, is_first=is_first)
    alone = [model.activations(part)[0] for part in tokens.split([1, 12, 17], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_learned_positions_go_on_from_a_state() -> None:
    model, tokens = placed(), torch.randint(64, (2, 30))
    wanted = model(tokens)
    logits, state = model.prefill(tokens[:, :10])
    logits, state = model.prefill(tokens[:, 10:20], state)
    torch.testing.assert_close(logits, wanted[:, 19])
    for t in range(20, 30):
        logits, state = model.step(tokens[:, t], state, inplace=t > 25)
        torch.testing.assert_close(logits, wanted[:, t])
    assert state[-1].tolist() == [30, 30]


def test_a_text_is_as_long_as_learned_positions_at_most() -> None:
    model, tokens = placed(), torch.zeros(1, 41, dtype=torch.long)
    model.activations(tokens[:, :40])
    with pytest.raises(ValueError, match=r"^model\.learned_positions: found 41 tokens, wanted at"):
        model.activations(tokens)


def placed() -> LanguageModel:
    """A model of 40 learned positions."""
    model = small("softmax", learned_positions=40).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["conformal_sympow", "softmax"])
def test_rows_hold_documents_by_their_first_tokens_or_by_offsets(kind: str) -> None:
    model = small(kind).double()
    tokens, target = torch.randint(64, (2, 1, 20))
    is_first = torch.zeros(1, 20, dtype=torch.bool)
    is_first[0, [0, 1, 13]] = True
    wanted = [model.activations(part)[0] for part in tokens.split([1, 12, 7], dim=1)]
    for documents in ({"is_first": is_first}, {"cu_seqlens": torch.tensor([0, 1, 13, 20])}):
        hidden, _ = model.activations(tokens, **documents)
        torch.testing.assert_close(hidden, torch.cat(wanted, 1), rtol=0, atol=1e-12)
        loss = F.cross_entropy(model.head(hidden[0]), target[0])
        assert model.loss(tokens, target, **documents).item() == pytest.approx(loss.item(), 1e-6)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 10, 10, 20])}, "cu_seqlens: found document 1 from 10"),
        ({"cu_seqlens": torch.tensor([0, 10, 19])}, "cu_seqlens: found .*, wanted offsets from 0"),
        ({"cu_seqlens": torch.tensor([0, 20]), "B": 2}, "cu_seqlens: found B = 2, wanted 1"),
        ({"is_first": torch.zeros(1, 19).bool()}, r"is_first: found \(1, 19\), wanted \(1, 20\)"),
        (
            {"is_first": torch.zeros(1, 20).bool(), "cu_seqlens": torch.tensor([0, 20])},
            "is_first: found together with cu_seqlens, wanted one of them",
        ),
        (
            {"is_first": torch.zeros(1, 20).bool(), "keep_state": True},
            "documents: found with a state or keep_state, wanted neither",
        ),
        (
            {"is_first": torch.zeros(1, 20).bool(), "positions": "dynamic_ntk"},
            "positions: found dynamic_ntk with several documents per row",
        ),
    ],
)
def test_documents_that_do_not_fit_are_refused(documents: dict[str, Any], message: str) -> None:
    model, options = small("softmax"), dict(documents)
    tokens = torch.zeros(options.pop("B", 1), 20, dtype=torch.long)
    if scaling := options.pop("positions", None):
        model.set_positions(PositionScaling(name=scaling, factor=2.0, context=10))
    with pytest.raises(ValueError, match=message):
        model.activations(tokens, **options)
