"""What the base of all kinds gives and refuses, and properties of single kinds."""

import pytest
import torch

from longhaul.configs.reference import kind_section
from longhaul.kernels import symmetric_dim
from longhaul.modules.attention import (
    Attention,
    AttentionConfig,
    LayerShape,
    attention_config,
    build_attention,
    registered_variants,
)
from longhaul.modules.attention.base import register
from longhaul.modules.documents import Documents

WIDTH, HEADS = 16, 2
SHAPE = LayerShape(width=WIDTH, heads=HEADS, key_heads=HEADS, head_dim=WIDTH // HEADS)


def test_state_size_matches_the_published_one() -> None:
    # 12 layers of 12 heads of 64 in half precision: the 39 MB and 14 GB of the sympow article.
    for degree, published in ((2, 39e6), (4, 14e9)):
        size = build_attention("sympow", 768, 12, degree=degree).state_size()
        assert size is not None
        assert 12 * 2 * size == pytest.approx(published, rel=0.03)
        assert size == 12 * symmetric_dim(64, degree) * 65 + 1  # + 1 is the rotation


class Incomplete(AttentionConfig):
    """A config that cannot build its module."""


class Unfinished(Attention):
    """A module without `forward`."""


def test_what_an_unfinished_kind_lacks_is_named() -> None:
    found = "^attention.kind: found incomplete, whose class Incomplete does not define build; w"
    with pytest.raises(ValueError, match=found):
        register("incomplete")(Incomplete)
    assert "incomplete" not in registered_variants()
    found = "^attention.kind: found softmax, whose class Unfinished does not define forward; w"
    with pytest.raises(ValueError, match=found):
        Unfinished(attention_config("softmax")(), SHAPE)


class Everything(Attention):
    """All that a kind must write; the rest is measured."""

    def forward(self, x, state=None, *, documents=None, keep_state=True):  # type: ignore
        seen = x if state is None else torch.cat([state, x], dim=1)
        return x + (x @ seen.mT) @ seen, seen if keep_state else None


def test_what_a_kind_does_not_say_is_measured() -> None:
    attention = Everything(attention_config("softmax")(), SHAPE)
    assert attention.state_size() is None
    assert attention.allocated_bytes(7, torch.bfloat16) == 7 * WIDTH * 2
    assert attention.mixing_flops(50) == attention.flops_per_token(50) == 4 * 50 * WIDTH
    assert attention.form(50, "torch") == "quadratic"
    assert not attention.passes_on_state(50, "torch")
    y, state = attention.step(torch.ones(2, 1, WIDTH), torch.ones(2, 3, WIDTH))
    assert y.shape == (2, 1, WIDTH)
    assert state.shape == (2, 4, WIDTH)


def test_softmax_has_no_state_of_fixed_size() -> None:
    assert build_attention("softmax", WIDTH, HEADS).state_size() is None


def test_flops_grow_with_context_for_softmax_alone() -> None:
    sizes = {kind: [build_attention(kind, 64, 1).flops_per_token(T) for T in (2**15, 2**16)]
             for kind in ("softmax", "sympow")}  # fmt: skip
    assert sizes["softmax"][1] > 1.9 * sizes["softmax"][0]
    assert sizes["sympow"][1] < 1.01 * sizes["sympow"][0]


def test_gates_and_rates_are_not_rounded_by_autocast() -> None:
    attention = build_attention("conformal_sympow", WIDTH, HEADS)
    x = torch.randn(1, 30, WIDTH)
    wanted = attention.gate(x), attention.rate(x)
    with torch.autocast("cpu", torch.bfloat16):
        documents = Documents(x)
        carried = attention.initial_carried(1, x.device)
        operands, after = attention.project(x, documents, carried)
        assert torch.equal(attention.gate(x), wanted[0])
        assert torch.equal(attention.rate(x), wanted[1])
    assert torch.equal(operands.sums[0].log_g, wanted[0])
    rotation = wanted[1].double().sum(dim=1)
    torch.testing.assert_close(after["rotation"], rotation, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sympow", {"degree": 3}, "degree: found 3"),
        ("sympow", {"degree": 0}, "degree: found 0"),
        ("sympow", {"longest_document": 1}, "longest_document: found 1"),
        ("softmax", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("retention", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("complex", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("cartan", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("zeros", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("coca", {"mode": "loose"}, "mode: found 'loose', wanted one of strict, slack"),
        ("linear", {"feature_map": "exp"}, "feature_map: found 'exp'"),
        ("linear", {"normalizer": "none"}, "normalizer: found 'none'"),
        (
            "linear",
            {"feature_map": "identity"},
            "normalizer: found .sum. with feature_map",
        ),
        ("cartan", {"generator": "sum"}, "generator: found 'sum'"),
        ("cartan", {"bilinear": False, "negative_diagonal": True}, "negative_diagonal: found true"),
        ("cartan", {"generator_per": "token"}, "generator_per: found 'token', wanted one of head"),
        ("cartan", {"lengths": "one"}, "lengths: found 'one', wanted one of unit, ratio, raw"),
        ("cartan", {"step_size": True, "generator": "product"}, "step_size: found true with"),
        ("cartan", {"bilinear": False, "lengths": "raw"}, "lengths: found 'raw' with bilinear"),
        ("complex", {"normalizer": "sum"}, "normalizer: found 'sum', wanted one of head_norm"),
        ("complex", {"decay": True, "learned_sizes": True}, "decay: found true with learned_sizes"),
        (
            "complex",
            {"normalizer": "amplitudes", "learned_sizes": True},
            "normalizer: found 'amplitudes' with learned_sizes",
        ),
        ("zeros", {"form": "paper"}, "form: found 'paper', wanted one of published, notes"),
        ("zeros", {"form": "notes", "zeroth": "first_layer"}, "zeroth: found 'first_layer' with"),
        ("zeros", {"bilinear": False}, "bilinear: found false with form published"),
        ("zeros", {"zeroth": "all"}, "zeroth: found 'all'"),
        ("sympow_gated", {"gate_init": "ones"}, "gate_init: found 'ones', wanted one of plain"),
        ("zeros", {"gate_init": "ones"}, "gate_init: found 'ones', wanted one of plain"),
        ("sympow_gated", {"gate": "none"}, "gate: found 'none', wanted one of data, learned, ret"),
        ("linear", {"gate": "retention"}, "gate: found 'retention', wanted one of none, data"),
        ("sympow", {"rotary": "learned"}, "rotary: found 'learned', wanted one of fixed, none"),
        ("linear", {"rotary": "learned"}, "rotary: found 'learned', wanted one of none, fixed"),
        ("sympow", {"degree": 1}, "degree: found 1"),
        ("sympow", {"initial_state": "low"}, "initial_state: found 'low'"),
        ("sympow", {"initial_state": "learned", "degree": 6}, "initial_state: found learned with"),
        ("sympow", {"rank": -1}, "rank: found -1"),
        ("linear", {"rank": 0}, "rank: found 0"),
        ("linear", {"chunk_size": 0}, "chunk_size: found 0"),
        ("softmx", {}, "wanted one of"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_options_are_named(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, WIDTH, HEADS, **options)


LONG, SHORT = {"gate_init": "long_memory"}, {"longest_document": 50}
LEARNED = "; if a gate is learned"
WITHOUT_TURNS = "none (longest_document is not read)"


@pytest.mark.parametrize(
    ("kind", "option", "reads", "ignores", "words"),
    [
        ("sympow_gated", LONG, {"gate": "data"}, {"gate": "retention"}, LEARNED),
        ("conformal_sympow", LONG, {"gate": "learned"}, {"gate": "alibi"}, LEARNED),
        ("linear", LONG, {"gate": "data"}, {"gate": "none"}, LEARNED),
        ("cartan", LONG, {"generator": "full"}, {"generator": "additive"}, LEARNED),
        ("cartan", LONG, {"generator": "product"}, {"generator": "additive"}, LEARNED),
        ("zeros", LONG, {"ordered": True}, {"ordered": False}, LEARNED),
        (
            "linear",
            {"rotary_base": 50.0},
            {"rotary": "fixed"},
            {"rotary": "none"},
            "none (rotary_base is not read)",
        ),
        ("sympow", SHORT, {"rotary": "fixed"}, {"rotary": "none"}, WITHOUT_TURNS),
        ("sympow_gated", SHORT, {"rotary": "fixed"}, {"rotary": "none"}, WITHOUT_TURNS),
        ("softmax", {"rotary_base": 50.0}, {}, {"longest_document": 64}, "null: rotary_base is"),
    ],
)
def test_an_option_is_read_where_the_documentation_says_so(
    kind: str,
    option: dict[str, object],
    reads: dict[str, object],
    ignores: dict[str, object],
    words: str,
) -> None:
    def outputs(options: dict[str, object]) -> torch.Tensor:
        torch.manual_seed(0)
        attention = build_attention(kind, WIDTH, HEADS, **options)
        outputs: torch.Tensor = attention(torch.randn(1, 8, WIDTH), keep_state=False)[0]
        return outputs

    assert not torch.equal(outputs(reads | option), outputs(reads))
    assert torch.equal(outputs(ignores | option), outputs(ignores))
    assert any(words in key.meaning for key in kind_section(kind).keys)
