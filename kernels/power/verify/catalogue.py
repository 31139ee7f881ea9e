"""All cases, in lists. The cases that a model needs come first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from longhaul.kernels.power.verify.cases import PowerCase
from longhaul.kernels.verify.candidates import MOST_CANDIDATES
from longhaul.kernels.verify.cases import DTYPES

_ONE = ("chunked",)
_MANY = tuple(range(0, 1984, 31))  # 64 short documents


def headline_cases() -> list[PowerCase]:
    """The call that training makes, in bfloat16."""
    return [
        PowerCase(name="degree 2, K 64"),
        PowerCase(name="carried on", is_continued=True, B=2, T=777),
    ]


def feature_cases(dtype: str) -> list[PowerCase]:
    """Cases for every feature of the op in one dtype, less those of the headline."""
    headline = headline_cases() if dtype == "bfloat16" else []
    cases = (replace(case, dtype=dtype) for case in [*headline_cases(), *_features()])
    return [case for case in cases if case not in headline]


def _features() -> Iterable[PowerCase]:
    yield PowerCase(name="degree 2, K 32", K=32, V=32, forms=_ONE, T=1000)
    yield PowerCase(name="degree 2, K 16", K=16, V=16, forms=_ONE, T=1000)
    yield PowerCase(name="degree 2, K 128", K=128, V=128, H=2, G=1, T=500)
    yield PowerCase(name="degree 1, K 64, not normalised", degree=1, normalize=False)
    yield PowerCase(name="degree 1, normalised", degree=1, T=1000)
    yield PowerCase(name="degree 1, K 256", degree=1, K=256, V=256, normalize=False, T=700)
    yield PowerCase(name="degree 4, K 16", degree=4, K=16, V=16, forms=_ONE, T=500)
    yield PowerCase(name="degree 4, K 32", degree=4, K=32, V=32, forms=_ONE, H=2, G=1, T=300)
    yield PowerCase(name="degree 4", degree=4, forms=("attention",), T=700)
    yield PowerCase(name="degree 6", degree=6, forms=("attention",), T=700)
    yield PowerCase(name="degree 8", degree=8, forms=("attention",), T=700)
    yield PowerCase(name="carried on, hard gates", is_continued=True, B=2, T=777, gates="hard")
    yield PowerCase(name="packed", documents=(0, 1, 64, 700), T=1500, is_continued=True)
    yield PowerCase(name="packed, without states", documents=(0, 1, 64, 230), T=300)
    yield PowerCase(name="64 short documents", documents=_MANY, T=2000, H=2, G=1)
    yield PowerCase(name="64 short documents, with states", documents=_MANY, T=2000, H=2, G=1,
               is_continued=True)  # fmt: skip
    yield PowerCase(name="not normalised, no gates", normalize=False, gates="none", T=1000)
    yield PowerCase(name="one query head for each key head", H=3, G=3, T=500)
    yield PowerCase(name="eight query heads for one key head", H=8, G=1, T=300)
    yield PowerCase(name="odd widths", K=20, V=17, H=3, G=3, T=63)
    yield PowerCase(name="one token", T=1, is_continued=True)
    yield PowerCase(name="gradient of v alone", T=300, wanted=("v",))
    yield PowerCase(name="wide strides", T=300, content="wide")
    for degree, K in ((2, 64), (2, 128), (1, 64), (4, 16)):
        yield PowerCase(name=f"steps, degree {degree}, K {K}", forms=("step",), T=9, B=2,
                   is_continued=True, degree=degree, K=K, V=K)  # fmt: skip
    for is_in_place in (False, True):
        yield PowerCase(name="a step, bfloat16 state" + ", in place" * is_in_place,
                        forms=("step",), T=1, B=2, is_continued=True, has_bfloat16_state=True,
                        is_in_place=is_in_place)  # fmt: skip
    yield PowerCase(name="state alone", forms=("state",), T=777, B=2, is_continued=True)
    yield PowerCase(name="state alone, packed", forms=("state",), T=700, documents=(0, 1, 64, 300))


def extreme_cases(backend: str) -> list[PowerCase]:
    """Cases with overflow, cancellation or resets."""
    both = ("bfloat16", "float32")
    cases = [
        *(PowerCase(name="reset in the middle", gates="reset", dtype=x) for x in both),
        *(
            PowerCase(name="orthogonal queries", content="orthogonal", dtype=x, T=1000)
            for x in both
        ),
        *(PowerCase(name="rotated orthogonal queries", content="rotated", dtype=x) for x in both),
        PowerCase(
            name="large at degree 4", content="large", degree=4, forms=("attention",), T=1000
        ),
        PowerCase(name="large at degree 4, K 16", content="large", degree=4, K=16, V=16, T=500),
        PowerCase(name="reset in the middle, degree 1", gates="reset", degree=1, normalize=False),
    ]
    if backend == "triton":
        # These weights do not fit in float32. Triton's attention form rescales them; the torch
        # backend's does not.
        cases += [
            PowerCase(
                name="large at degree 8", content="large", degree=8, forms=("attention",), T=700
            )
        ]
    return cases


def long_cases() -> list[PowerCase]:
    """Sequences longer than 131,072 tokens, up to more than a million."""
    long = PowerCase(name="131,073 tokens", H=2, G=1, T=131_073)
    ones = replace(long, name=f"{long.name}, gates of 1", gates="ones")
    million = PowerCase(name="1,048,577 tokens", H=1, G=1, T=2**20 + 1, forms=_ONE)
    return [
        *(replace(long, dtype=dtype) for dtype in DTYPES),
        *(replace(ones, dtype=dtype) for dtype in ("bfloat16", "float32")),
        replace(long, name=f"{long.name}, degree 1", degree=1, normalize=False, forms=_ONE),
        replace(long, name=f"{long.name}, strides beyond 2^31 elements", content="wide"),
        million,
        replace(million, name=f"{million.name}, degree 1", degree=1, normalize=False),
    ]


def candidate_cases() -> list[PowerCase]:
    """Cases that run every configuration of every kernel, not only that of the chip."""
    cases = [*headline_cases(), *_features()]
    shapes = [case for case in cases if "step" not in case.forms]
    return [
        replace(case, name=f"{case.name}, candidate {index}", candidate=index)
        for index in range(MOST_CANDIDATES)
        for case in shapes
    ]
