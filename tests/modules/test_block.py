"""Norms, MLPs and what else stands around attention, against formulas in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.norms import RMSNorm

D, HEADS, LAYERS, VOCABULARY = 16, 2, 2, 40
LLAMA: dict[str, Any] = {
    **{"norm": "rms", "norm_eps": 1e-2, "mlp": "swiglu", "mlp_width": 22},
    **{"embedding_norm": False, "tied_head": False},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "rms with offset": {**LLAMA, "norm": "rms_offset"},
    "layer norm of another eps": {"norm_eps": 0.3, "biases": True},
    "geglu": {**LLAMA, "mlp": "geglu", "mlp_width": 33, "biases": True},
    "gelu_erf": {"mlp": "gelu_erf", "mlp_width": 7, "biases": True},
    "relu2": {"mlp": "relu2", "parallel_residual": True},
    "qwen2": {**LLAMA, "biases": ["qkv"]},
    "biases in other places": {"biases": ["norms", "mlp", "out"]},
    "scaled and capped": {"embedding_scale": 1.7, "embedding_norm": False, "logit_softcap": 2.0},
    "olmo-2": {**LLAMA, "norm_order": "post"},
    "gemma": {**LLAMA, "norm": "rms_offset", "norm_order": "sandwich", "mlp": "geglu"},
    "parallel with norms after": {"norm_order": "post", "parallel_residual": True},
    "layer norms before and after": {"norm_order": "sandwich", "biases": True},
    "olmo-hybrid with softmax alone": {**LLAMA, "norm_order": "hybrid"},
    "no mlp": {"mlp": "none", "norm_order": "sandwich"},
}


def config(kind: str = "softmax", **options: Any) -> LanguageModelConfig:
    sizes = {"layers": LAYERS, "width": D, "heads": HEADS, "vocabulary": VOCABULARY}
    return LanguageModelConfig(attention=attention_config(kind)(), **sizes | options)


def disturbed(kind: str = "softmax", **options: Any) -> LanguageModel:
    """A model in float64 in which every parameter matters."""
    torch.manual_seed(0)
    model = LanguageModel(config(kind, **options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


class Formula:
    """The model of a config written out, for softmax attention without rotation."""

    def __init__(self, model: LanguageModel) -> None:
        self.config = model.config
        self.w = dict(model.named_parameters())

    def norm(self, x: Tensor, name: str) -> Tensor:
        c, w = self.config, self.w[f"{name}.weight"]
        if c.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        x = x * (1 + w if c.norm == "rms_offset" else w)
        return x + self.w.get(f"{name}.bias", 0)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        def tanh_gelu(x: Tensor) -> Tensor:
            return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())

        kind, up = self.config.mlp, self.linear(x, f"{name}.up")
        if kind in ("swiglu", "geglu"):
            gate = self.linear(x, f"{name}.gate")
            hidden = up * (gate / (1 + (-gate).exp()) if kind == "swiglu" else tanh_gelu(gate))
        elif kind == "gelu":
            hidden = tanh_gelu(up)
        elif kind == "gelu_erf":
            hidden = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        else:
            hidden = torch.where(up > 0, up * up, 0)
        return self.linear(hidden, f"{name}.out")

    def attention(self, x: Tensor, name: str) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for one in self.linear(x, f"{name}.qkv").chunk(3, dim=-1)
        )
        half, T = q.shape[-1] // 2, q.shape[2]
        angle = torch.arange(T, dtype=torch.float64)[:, None] * 10_000.0 ** (
            -torch.arange(half, dtype=torch.float64) / half
        )

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat(
                [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
            )

        scores = turned(q) @ turned(k).mT / math.sqrt(2 * half)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2), f"{name}.out")

    def branch(self, x: Tensor, name: str, function: Callable[[Tensor, str], Tensor]) -> Tensor:
        order = self.config.norm_order
        order = "post" if order == "hybrid" else order  # softmax is of quadratic cost
        y = function(x if order == "post" else self.norm(x, f"{name}_norm"), name)
        return y if order == "pre" else self.norm(y, f"{name}_post_norm")

    def logits(self, tokens: Tensor) -> Tensor:
        c, x = self.config, self.config.embedding_scale * self.w["embedding.weight"][tokens]
        if c.embedding_norm:
            x = self.norm(x, "embedding_norm")
        for layer in range(c.layers):
            block = f"blocks.{layer}"
            mixed = x + self.branch(x, f"{block}.attention", self.attention)
            if c.mlp == "none":
                x = mixed
                continue
            read = x if c.parallel_residual else mixed
            x = mixed + self.branch(read, f"{block}.mlp", self.mlp)
        head = "embedding" if c.tied_head else "lm_head"
        y = self.norm(x, "final_norm") @ self.w[f"{head}.weight"].T
        return y if c.logit_softcap is None else c.logit_softcap * (y / c.logit_softcap).tanh()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_computes_what_its_formulas_say(shape: str) -> None:
    model = disturbed(**SHAPES[shape])
    tokens, target = torch.randint(VOCABULARY, (2, 2, 13)).unbind(0)
    logits = Formula(model).logits(tokens)
    torch.testing.assert_close(model(tokens), logits)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    loss = model.loss(tokens, target)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found, gradients = (torch.autograd.grad(one, parameters) for one in (loss, wanted))
    for name, one, other in zip(names, found, gradients, strict=True):
        assert other.abs().max() > 1e-6, name
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=lambda t, n=name: n + t)


@pytest.mark.parametrize("kind", registered_variants())
def test_in_the_shape_of_llama_prefill_and_steps_equal_one_forward_pass(kind: str) -> None:
    model = disturbed(kind, **LLAMA)
    tokens = torch.randint(VOCABULARY, (2, 12))
    wanted = model(tokens)
    logits, state = model.prefill(tokens[:, :9])
    torch.testing.assert_close(logits, wanted[:, 8])
    for t in range(9, 12):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, wanted[:, t])


@pytest.mark.parametrize("kind", registered_variants())
def test_biases_of_zeros_are_in_their_places_alone(kind: str) -> None:
    places = {
        "qkv": lambda name: ".attention." in name and not name.endswith(".out.bias"),
        "out": lambda name: name.endswith(".attention.out.bias"),
        "mlp": lambda name: ".mlp." in name,
        "norms": lambda name: name.rpartition(".")[0].endswith("_norm"),
    }
    found = dict.fromkeys(["none", "all", *places], frozenset[str]())
    for place in found:
        chosen: Any = {"none": False, "all": True}.get(place, [place])
        model = LanguageModel(config(kind, biases=chosen))
        found[place] = frozenset(name for name, _ in model.named_parameters())
        for name in found[place] - found["none"]:
            assert torch.equal(
                model.get_parameter(name), torch.zeros_like(model.get_parameter(name))
            )
    for place, is_there in places.items():
        added = found[place] - found["none"]
        assert added
        assert added == {name for name in found["all"] - found["none"] if is_there(name)}


def stds(init: str, **options: Any) -> dict[str, float]:
    """Of all matrices in a model that is wide enough for them to be measured."""
    torch.manual_seed(0)
    sizes = {"width": 64, "mlp_width": 300, "vocabulary": 2000, "mlp": "swiglu"}
    model = LanguageModel(config(**sizes | options, init=init, biases=["mlp"]))
    for layer in range(LAYERS):
        assert not model.blocks[layer].mlp.gate.bias.any()
    if init == "olmo":
        assert all(one.abs().max() <= 0.06 for one in model.parameters() if one.ndim == 2)
    if init == "nanochat":
        bound = math.sqrt(3 / 64)
        assert 0.99 * bound < model.blocks[0].attention.qkv.weight.max() <= bound
    return {name: one.std().item() for name, one in model.named_parameters() if one.ndim == 2}


@pytest.mark.parametrize(
    ("init", "embedding", "matrices", "ups", "outs", "head"),
    [
        ("gpt2", 0.02, 0.02, (0.02, 0.02), (0.01, 0.01), 0.02),
        ("normal", 0.02, 0.02, (0.02, 0.02), (0.02, 0.02), 0.02),
        # Cut at three deviations, a normal distribution has 0.9866 of its deviation.
        ("olmo", 0.01973, 0.01973, (0.01973, 0.01973), (0.01973, 0.01973), 0.01973),
        ("llama", 1, 0.02, (0.02 / 2**0.5, 0.01), (0.02 / 2**0.5, 0.01), 0.9866 / 8),
        ("nanochat", 0.8, 1 / 8, (0.05, 0.05), (0, 0), 0.001),
    ],
)
def test_matrices_begin_as_an_initialisation_says(
    init: str,
    embedding: float,
    matrices: float,
    ups: tuple[float, float],
    outs: tuple[float, float],
    head: float,
) -> None:
    wanted = {"embedding": embedding, "lm_head": head}
    for layer, (up, out) in enumerate(zip(ups, outs, strict=True)):
        gate = up if init == "nanochat" else matrices
        block = {"attention.qkv": matrices, "mlp.gate": gate, "mlp.up": up}
        block |= {"attention.out": out, "mlp.out": out}
        wanted |= {f"blocks.{layer}.{name}": std for name, std in block.items()}
    found = stds(init, tied_head=False)
    assert found == {f"{name}.weight": pytest.approx(std, 0.03) for name, std in wanted.items()}
    assert stds(init)["embedding.weight"] == pytest.approx(head, 0.03)


@pytest.mark.parametrize("has_offset", [False, True])
def test_an_rms_norm_in_bf16_is_rounded_once(has_offset: bool) -> None:
    norm = RMSNorm(300, eps=1e-6, has_offset=has_offset)
    x = (3 * torch.randn(5, 300)).bfloat16()
    assert torch.equal(norm.weight, torch.full((300,), 0.0 if has_offset else 1.0))
    with torch.no_grad():
        norm.weight.add_(0.1 * torch.randn(300))
        if not has_offset:  # a gain has the dtype of x
            norm.weight.copy_(norm.weight.bfloat16())
    exact = x.double()
    wanted = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = wanted * (norm.weight.double() + has_offset)
    found = norm(x)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16, and what float32 rounded before.
    assert ((found.double() - wanted).abs() <= 2**-8 * 1.001 * wanted.abs()).all()
    torch.testing.assert_close(norm(x.float()).double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_rms_norm_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    wide = torch.randn(2, 17, 3, 24).to(dtype)
    norm = RMSNorm(8, eps=0.1)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().clone().requires_grad_()
    for x in (wide[..., 8:16], wide[..., :8].contiguous()):
        x = x.detach().requires_grad_()
        pairs = ((norm(x), norm.weight), (F.rms_norm(x, (8,), weight.to(dtype), 0.1), weight))
        probe = torch.randn(2, 17, 3, 8).to(dtype)
        found, wanted = ((y, *torch.autograd.grad(y, (x, w), probe)) for y, w in pairs)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_an_rms_norm_keeps_its_input_alone_and_has_two_derivatives() -> None:
    norm = RMSNorm(5, eps=0.1, has_offset=True).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        y = norm(x)
    assert [one.shape for one in kept if one is not x] == [(5,)]
    wanted = F.rms_norm(x, (5,), 1 + norm.weight, 0.1)
    torch.testing.assert_close(y, wanted)
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradgradcheck(norm, x)
    probe = torch.randn_like(y)
    found, others = (torch.autograd.grad(one, (x, norm.weight), probe) for one in (y, wanted))
    torch.testing.assert_close(found, others)


def test_parameters_and_flops_of_a_gated_block_match_the_formulas() -> None:
    width = 22
    model = LanguageModel(config(**LLAMA))
    block = 4 * D * D + 3 * D * width + 2 * D
    assert model.num_parameters() == 2 * VOCABULARY * D + LAYERS * block + D
    assert model.weight_flops() == 2 * (VOCABULARY * D + LAYERS * (4 * D * D + 3 * D * width))
    for order, norms in (("post", 2), ("sandwich", 4)):
        model = LanguageModel(config(**LLAMA, norm_order=order))
        number = 2 * VOCABULARY * D + LAYERS * (block + (norms - 2) * D) + D
        assert model.num_parameters() == number
    plain = LanguageModel(config(mlp="relu2"))
    assert plain.weight_flops() == LanguageModel(config()).weight_flops()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"biases": ["qkv", "head"]},
            "model.biases: found 'head', wanted true, false or some of qkv, out, mlp, norms",
        ),
        ({"mlp_width": 0}, "model.mlp_width: found 0, wanted 1 or more"),
        ({"logit_softcap": 0.0}, "model.logit_softcap: found 0.0, wanted more than 0"),
        ({"embedding_scale": -1.0}, "model.embedding_scale: found -1.0, wanted more than 0"),
        ({"norm_eps": 0.0}, "model.norm_eps: found 0.0, wanted more than 0"),
        (
            {"norm": "rms", "biases": ["mlp", "norms"]},
            "model.biases: found 'norms' with model.norm rms, which has none; wanted it left out",
        ),
    ],
)
def test_a_shape_that_does_not_exist_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize("option", ["norm", "norm_order", "mlp", "init", "qk_norm"])
@pytest.mark.usefixtures("unchecked_types")
def test_a_word_that_an_option_does_not_have_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"^model.{option}: found 'other', wanted one of "):
        config(**{option: "other"})
