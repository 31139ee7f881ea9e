"""The gates of all kinds that have one, against their definitions."""

import pytest
import torch
from pairwise import assert_same, build, sigmoid, tokens

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
