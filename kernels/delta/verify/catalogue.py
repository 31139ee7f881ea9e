"""All cases, in lists. The cases that a model needs come first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from longhaul.kernels.delta.verify.cases import DeltaCase, Runner
from longhaul.kernels.delta.verify.shapes import NUM_CANDIDATES
from longhaul.kernels.verify.cases import DTYPES

BACKENDS: tuple[Runner, ...] = ("torch", "triton")
"""Those of ours that a call can be asked to run on."""

_BOTH = ("chunked", "recurrent")
_MANY = tuple(range(0, 1984, 31))  # 64 short documents


def feature_cases(dtype: str) -> list[DeltaCase]:
    """Cases for every feature of the op in one dtype, on each of its backends."""
    return [
        _on(case, backend, dtype)
        for backend in BACKENDS
        for case in _features()
        if backend == "torch" or "step" not in case.forms  # Triton has no step
    ]


def extreme_cases() -> list[DeltaCase]:
    """Decays of exactly 0 and 1, very strong ones, and keys that all are one."""
    cases = [
        DeltaCase(
            name=f"{decays} gates, {gates}" + ", nothing is erased" * (not erases),
            decays=decays,
            gates=gates,
            erases=erases,
            T=500,
        )
        for gates in ("scalar", "channel")
        for decays, erases in (("hard", True), ("strong", True), ("reset", True), ("hard", False))
    ]
    # What Triton's kernels round adds up at strength 2: README.md, section 7.
    strengths = {"torch": 2, "triton": 1}
    return [
        _on(case, backend, dtype)
        for backend in BACKENDS
        for dtype in ("bfloat16", "float32")
        for case in (
            *cases,
            DeltaCase(
                name="equal keys", gates="none", strength_of_equal_keys=strengths[backend], T=256
            ),
        )
    ]


def long_cases() -> list[DeltaCase]:
    """Sequences longer than 131,072 tokens."""
    long = DeltaCase(name="131,073 tokens", H=2, G=1, T=131_073, is_continued=True)
    every = [long, replace(long, name=f"{long.name}, a gate a channel", gates="channel")]
    return [_on(case, backend, dtype) for backend in BACKENDS for case in every for dtype in DTYPES]


def candidate_cases() -> list[DeltaCase]:
    """What differs in code, with every configuration of every kernel."""
    one = DeltaCase(name="K 128", K=128, V=128, T=700)
    cases = [
        replace(one, name=f"{one.name}, gates {gates}{mark}", gates=gates, erases=erases)
        for gates in ("scalar", "channel")
        for erases, mark in ((True, ""), (False, ", nothing is erased"))
    ]
    return [
        _on(
            replace(case, name=f"{case.name}, candidate {index}", candidate=index),
            "triton",
            "bfloat16",
        )
        for index in range(NUM_CANDIDATES)
        for case in cases
    ]


def peer_cases() -> list[DeltaCase]:
    """What flash-linear-attention's kernels are asked for, each of them, in bfloat16."""
    cases = []
    for gates in ("none", "scalar", "channel"):
        for erases in (True, False):
            what = f"gates {gates}" + ", nothing is erased" * (not erases)
            given = DeltaCase(name=what, gates=gates, erases=erases, T=700, is_continued=True)
            cases += [replace(given, name=f"carried on, {what}", B=2)]
            cases += [replace(given, name=f"packed, {what}", documents=(0, 1, 64, 300))]
            if gates != "none":
                cases += [replace(given, name=f"reset, {what}", B=2, decays="reset")]
    return [_on(case, "fla", "bfloat16") for case in cases]


def _features() -> Iterable[DeltaCase]:
    yield DeltaCase(name="K 64, a gate a head")
    yield DeltaCase(name="K 64, a gate a channel", gates="channel")
    yield DeltaCase(name="DeltaNet", gates="none", H=4, G=4, K=128, V=128, T=700)
    yield DeltaCase(name="Gated DeltaNet", H=4, G=2, K=128, V=128, T=700)
    yield DeltaCase(name="Gated DeltaNet, wide values", H=2, G=2, K=256, V=512, T=200)
    yield DeltaCase(name="KDA", gates="channel", H=2, G=2, K=128, V=128, T=700)
    yield DeltaCase(name="GLA", gates="channel", erases=False, H=2, G=2, K=128, V=256, T=500)
    yield DeltaCase(name="one head of keys", erases=False, H=8, G=1, K=128, V=64, T=500)
    yield DeltaCase(name="linear attention", gates="none", erases=False, T=1000)
    for gates in ("none", "scalar", "channel"):
        for erases in (True, False):
            what = f"gates {gates}" + ", nothing is erased" * (not erases)
            given = DeltaCase(name=what, gates=gates, erases=erases, is_continued=True)
            yield replace(given, name=f"carried on, {what}", B=2, T=333, forms=_BOTH)
            yield replace(given, name=f"packed, {what}", T=700, documents=(0, 1, 64, 300))
            yield replace(given, name=f"steps, {what}", B=2, T=9, forms=("step",))
            yield replace(
                given, name=f"summary, {what}", T=333, forms=("summary",), is_continued=False
            )
    yield DeltaCase(name="packed, without states", documents=(0, 1, 64, 230), T=300)
    yield DeltaCase(name="64 short documents", documents=_MANY, H=2, G=1, is_continued=True)
    yield DeltaCase(name="odd widths", K=20, V=17, H=3, G=3, T=63, gates="channel")
    yield DeltaCase(name="one token", T=1, is_continued=True)


def _on(case: DeltaCase, backend: Runner, dtype: str) -> DeltaCase:
    return replace(case, name=f"delta rule, {backend}: {case.name}", runs_on=backend, dtype=dtype)
