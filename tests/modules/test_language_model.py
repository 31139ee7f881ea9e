"""The language model: losses, memory, decoding, and layers of different variants."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.attention.power import PowerConfig
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.modules.rotary import PositionScaling

PEAK_OF_A_LONG_LOSS = """
import resource, sys, torch
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
attention = attention_config("sympow")()
model = LanguageModel(
    LanguageModelConfig(attention=attention, layers=1, width=16, heads=1, vocabulary=50_304)
)
T = int(sys.argv[1])
tokens = torch.zeros(1, T, dtype=torch.int64)
hidden = torch.randn(1, T, 16, requires_grad=True)
model.activations = lambda tokens, state=None, keep_state=False: (hidden, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = model.loss(tokens, tokens)
loss.backward()
assert hidden.grad.isfinite().all() and model.embedding.weight.grad is not None
model.token_losses(tokens, tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def is_power(kind: str) -> bool:
    return issubclass(attention_config(kind), PowerConfig)


def small(kind: str = "conformal_sympow") -> LanguageModel:
    torch.manual_seed(0)
    attention = attention_config(kind)()
    return LanguageModel(
        LanguageModelConfig(layers=2, width=32, heads=2, vocabulary=64, attention=attention)
    )


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
    torch.testing.assert_close(wanted, (hidden @ model.embedding.weight.T).float())
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


def test_parameters_and_flops_match_the_formulas() -> None:
    D, L, vocabulary = 32, 2, 64
    model = small("softmax")
    assert model.num_parameters() == vocabulary * D + L * (12 * D * D + 2 * D) + 2 * D
    context = 100
    mixing = 2 * (context + 1) * D
    assert model.flops_per_token(context) == 2 * vocabulary * D + L * (24 * D * D + mixing)
    assert model.mixing_flops(context) == L * mixing
    assert model.weight_flops() == model.flops_per_token(context) - L * mixing


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
        torch.testing.assert_close(logits, wanted[:, t].float())
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


@pytest.mark.parametrize("kind", [kind for kind in registered_variants() if is_power(kind)])
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
