"""The Triton kernels of the delta rule, interpreted, against the recurrence in float64."""

import logging

import pytest
import torch
from delta_cases import Case

from longhaul.kernels import backend
from longhaul.kernels.delta import delta_rule, op

CASES = {
    "scalar gates": Case(T=21, B=1, H=2, G=1),
    "channel gates": Case(T=21, B=1, H=2, G=1, gates="channel"),
    "nothing is erased": Case(T=21, B=1, gates="channel", erases=False),
}
WIDE = {
    "one token": Case(T=1),
    "no gates": Case(T=63, gates="none"),
    "no gates, no state": Case(T=63, gates="none", has_state=False),
    "nothing is erased or forgotten": Case(T=63, gates="none", erases=False),
    "nothing is erased, scalar gates": Case(T=40, erases=False),
    "long chunks": Case(T=150, H=2, G=1),
    "long chunks, channel gates": Case(T=150, H=2, G=1, gates="channel"),
    "wide": Case(T=40, B=1, K=70, V=130, gates="channel"),
    "wide, scalar gates": Case(T=40, B=1, K=130, V=70),
    **{
        f"{extreme}, {gates}": Case(T=70, B=1, gates=gates, inputs_are=extreme)  # type: ignore[arg-type]
        for extreme in (
            *("gates of 0 and 1", "strong gates", "beta 0 and 2", "keys of 0", "equal keys"),
        )
        for gates in ("scalar", "channel")
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_equals_the_definition(case: Case) -> None:
    case.check(torch.float32, backend="triton", chunk_size=16)


def test_it_takes_chunks_shorter_than_its_blocks() -> None:
    Case(T=21, B=1).check(torch.float32, backend="triton", chunk_size=8)


def test_it_says_once_why_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """K 300 in bfloat16, where "auto" would take Triton's kernels."""
    backend._log_once.cache_clear()
    monkeypatch.setattr(op, "resolve_backend", lambda *_: "triton")
    monkeypatch.setattr(op, "why_dtype_unsupported", lambda _: None)
    x = torch.randn(1, 3, 1, 300).bfloat16()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            delta_rule(x, x, x, None)
    assert [record.message for record in caplog.records] == [
        "the delta rule runs in torch, not Triton: its kernels take K up to 256, found 300"
    ]


@pytest.mark.wide
@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE.keys())
def test_every_form_equals_the_definition(case: Case) -> None:
    case.check(torch.float32, backend="triton")
