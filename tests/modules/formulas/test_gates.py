"""The gates of all kinds that have one, against their definitions."""

import pytest
import torch
from pairwise import assert_same, build, sigmoid, tokens

from longhaul.modules.attention import build_attention
from longhaul.modules.rotary import PositionScaling

FORGETTING = [
    ("sympow_gated", {}),
    ("conformal_sympow", {}),
    ("cartan", {"generator": "product"}),
    ("cartan", {"generator": "full"}),
    ("zeros", {"ordered": True}),
]


@pytest.mark.parametrize(("kind", "options"), FORGETTING)
def test_a_plain_gate_is_the_sigmoid_of_a_projection_without_bias(
    kind: str, options: dict[str, object]
) -> None:
    plain, x = build(kind, gate_init="plain", **options), tokens()
    assert not [name for name, _ in plain.named_parameters() if "gate" in name and "bias" in name]
    for gate in plain.fading if kind == "zeros" else [plain.gate]:
        assert_same(gate(x).exp(), sigmoid(x @ gate.weight.mT))
    biased = build(kind, gate_init="long_memory", **options)
    missing = biased.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing
    assert all(name.endswith("bias") for name in missing)
    with torch.no_grad():
        for name in missing:
            biased.get_parameter(name).zero_()
    assert_same(plain(x, keep_state=False)[0], biased(x, keep_state=False)[0])


@pytest.mark.parametrize(
    ("gate", "gate_init", "wanted"),
    [
        ("data", "plain", [0.5, 0.5, 0.5]),
        ("data", "long_memory", [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7]),
        ("learned", "plain", [0.5, 0.5, 0.5]),
        ("learned", "long_memory", [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7]),
        ("retention", "plain", [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7]),
    ],
)
def test_gates_begin_as_they_are_named(gate: str, gate_init: str, wanted: list[float]) -> None:
    attention = build_attention("sympow_gated", 48, 3, gate=gate, gate_init=gate_init)
    assert_same(
        attention.gate(torch.zeros(1, 1, 48)).double().exp()[0, 0],
        torch.tensor(wanted).double(),
        1e-6,
    )


@pytest.mark.parametrize(
    ("gate", "numbers"), [("data", 3 * 48), ("learned", 3), ("retention", 0), ("alibi", 0)]
)
def test_gates_that_are_fixed_have_no_parameters(gate: str, numbers: int) -> None:
    attention = build_attention("conformal_sympow", 48, 3, gate=gate)
    assert sum(p.numel() for p in attention.parameters()) == 4 * 48 * 48 + 48 + numbers


@pytest.mark.parametrize("kind", ["sympow", "sympow_gated", "linear"])
def test_positions_are_scaled_only_where_there_are_any(kind: str) -> None:
    scaling = PositionScaling(name="linear", factor=2.0)
    build_attention(kind, 16, 2, rotary="fixed").set_positions(scaling)
    with pytest.raises(
        ValueError, match=f"positions: found 'linear' for .* kind {kind}, wanted none"
    ):
        build_attention(kind, 16, 2, rotary="none").set_positions(scaling)
