"""Every form of the delta rule against the recurrence in float64: outputs, states, gradients."""

from typing import Any

import pytest
import torch
from delta_cases import Case

FORMS: dict[str, dict[str, Any]] = {
    "chunked-1": {"chunk_size": 1},
    "chunked-16": {"chunk_size": 16},
    "chunked": {},
    "recurrent": {"form": "recurrent"},
}
CASES = {
    "one token": Case(T=1),
    "scalar gates": Case(T=100, H=4, G=2),
    "channel gates": Case(T=100, H=4, G=2, gates="channel"),
    "no gates": Case(T=63, gates="none"),
    "no gates, no state": Case(T=63, gates="none", has_state=False),
    "nothing is erased": Case(T=63, gates="channel", erases=False),
    "nothing is erased or forgotten": Case(T=63, gates="none", erases=False),
    "wide": Case(T=40, B=1, K=20, V=33, gates="channel"),
    **{
        f"{extreme}, {gates}": Case(T=70, B=1, gates=gates, inputs_are=extreme)  # type: ignore[arg-type]
        for extreme in (
            *("gates of 0 and 1", "strong gates", "beta 0 and 2", "keys of 0", "equal keys"),
        )
        for gates in ("scalar", "channel")
    },
}


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float32_equals_the_definition(case: Case, how: dict[str, Any]) -> None:
    case.check(torch.float32, **how)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("gates", ["scalar", "channel"])
def test_float64_stays_float64(gates: Any, how: dict[str, Any]) -> None:
    Case(T=70, B=1, gates=gates).check(torch.float64, **how)


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_accumulate_in_float32(how: dict[str, Any], dtype: torch.dtype) -> None:
    Case(T=100).check(dtype, **how)


@pytest.mark.parametrize("gates", ["scalar", "channel"])
def test_several_groups_of_chunks(monkeypatch: pytest.MonkeyPatch, gates: Any) -> None:
    """The states between groups, and rows of the batch that do not run together."""
    monkeypatch.setattr("longhaul.kernels.delta.torch.grid._GROUP_TOKENS", 32)
    Case(T=70, B=3, gates=gates).check(torch.float64, chunk_size=8)
    Case(T=10, B=3, gates=gates).check(torch.float64, chunk_size=4)
