"""Which calls are executed, on which chip, with which of the candidates of their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longhaul.kernels.cross_entropy.verify import LossCase
from longhaul.kernels.delta.verify.cases import DeltaCase
from longhaul.kernels.power.verify.cases import PowerCase
from longhaul.kernels.rotary.verify import RotationCase
from longhaul.kernels.verify.cases import Case

_TARGETS = ("sm_90", "sm_80")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call, forward and backward, with all kernels that it launches."""

    case: Case
    form: str = "chunked"  # or "attention", "step", "loss", "rotation"
    target: str = "sm_90"
    candidate: int = 0
    chunk_size: int = 64

    @property
    def name(self) -> str:
        case = self.case
        words = [self.form, case.name, case.dtype, self.target, f"candidate {self.candidate}"]
        return ", ".join(words)


# Two chunks and a bit, in which no size divides another.
_ONE_HEAD = PowerCase(name="p2 K64", T=150, H=1, G=1)
# The second is one chunk or more: tables of chunks then have rows that no document needs.
_DOCUMENTS = (0, 1, 65)
_CONTINUED = PowerCase(
    name="packed, continued, two groups",
    T=90,
    H=4,
    G=2,
    K=32,
    V=32,
    documents=_DOCUMENTS,
    is_continued=True,
)


def _chunked() -> Iterator[tuple[PowerCase, int]]:
    """Cases of power attention in chunks, and with how many candidates they run in bfloat16."""
    # Long enough for every stage of the pipelines of loads: chunks have four blocks.
    yield replace(_ONE_HEAD, name="p2 K64, long chunks", T=300), 2
    yield _ONE_HEAD, 3
    yield _CONTINUED, 3
    yield replace(_ONE_HEAD, name="p2 K16", K=16, V=16), 2
    yield replace(_CONTINUED, name="kept states", K=16, V=16, is_continued=False), 1
    yield replace(_ONE_HEAD, name="p2 K128", K=128, V=128), 2
    yield replace(_ONE_HEAD, name="p1 K64", degree=1), 2
    yield replace(_ONE_HEAD, name="p1 K128, a sum", degree=1, K=128, V=128, normalize=False), 2
    yield replace(_ONE_HEAD, name="p4 K16", degree=4, K=16, V=16, T=70), 2
    yield replace(_ONE_HEAD, name="p4 K32", degree=4, K=32, V=32, T=20), 2
    yield replace(_ONE_HEAD, name="p2, a sum without gates", normalize=False, gates="none", T=90), 1
    yield replace(_ONE_HEAD, name="odd widths", T=33, H=3, G=3, K=20, V=17), 1
    yield replace(_ONE_HEAD, name="gates of 0 and 1", T=90, gates="hard"), 1
    yield replace(_ONE_HEAD, name="wide strides", T=70, H=2, content="wide"), 1
    yield replace(_CONTINUED, name="one token", T=1, documents=()), 1


def _attention() -> Iterator[tuple[PowerCase, int]]:
    yield _ONE_HEAD, 3
    yield replace(_ONE_HEAD, name="p2 K64, long", T=300, H=2), 3
    yield replace(_ONE_HEAD, name="p2 K128", K=128, V=128), 1
    yield replace(_ONE_HEAD, name="p1 K64", degree=1), 1
    yield replace(_ONE_HEAD, name="p4 K64", degree=4), 1
    yield replace(_ONE_HEAD, name="p6 K64", degree=6), 1
    yield replace(_ONE_HEAD, name="p8 K64", degree=8), 1
    yield replace(_ONE_HEAD, name="packed, two groups", H=4, G=2, documents=_DOCUMENTS), 1
    yield replace(_ONE_HEAD, name="p2, a sum without gates", normalize=False, gates="none"), 1
    yield replace(_ONE_HEAD, name="odd widths", T=33, H=3, G=3, K=20, V=17), 1


def _steps() -> Iterator[Case]:
    three = replace(_CONTINUED, documents=(), T=3, B=2, forms=("step",))
    yield replace(three, name="p2 K64", K=64, V=64)
    rounded = replace(three, T=1, K=64, V=64, has_bfloat16_state=True)
    yield replace(rounded, name="p2 K64, bfloat16 state")
    yield replace(rounded, name="p2 K64, bfloat16 state, in place", is_in_place=True)
    yield replace(three, name="p2 K128", K=128, V=128)
    yield replace(three, name="p1 K64", degree=1, K=64, V=64)
    yield replace(three, name="p4 K16", degree=4, K=16, V=64)


def _others() -> Iterator[Case]:
    yield LossCase(name="two blocks of ids", T=3, vocabulary=5001)
    yield LossCase(name="257 ids", T=2, vocabulary=257)
    yield LossCase(name="capped, z-loss", T=2, vocabulary=257, softcap=4.0, z_loss=0.1)
    yield RotationCase(name="K 64", T=40, H=2)
    yield RotationCase(name="odd sizes", B=2, T=33, H=3, K=20)
    yield RotationCase(name="phases per head", T=33, H=2, K=32, has_phases_per_head=True)
    yield RotationCase(name="heads first", B=2, T=33, H=2, K=32, has_heads_first=True)


def _deltas() -> Iterator[tuple[DeltaCase, int]]:
    """Calls of the delta rule, and with how many candidates they run in bfloat16."""
    one = DeltaCase(name="", T=150, H=1, G=1, runs_on="triton")
    for gates in ("none", "scalar", "channel"):
        for erases in (True, False):
            what = f"delta rule, gates {gates}" + ", nothing is erased" * (not erases)
            yield replace(one, name=what, gates=gates, erases=erases), 3
    documents = replace(one, T=90, H=2, K=32, V=32, documents=_DOCUMENTS, is_continued=True)
    for gates in ("scalar", "channel"):
        name = f"delta rule, packed, continued, gates {gates}"
        yield replace(documents, name=name, gates=gates), 2
    yield replace(one, name="delta rule, K128 V96", T=70, K=128, V=96), 3
    yield replace(one, name="delta rule, odd widths", T=33, H=3, G=3, K=20, V=17), 1
    yield replace(one, name="delta rule, gates of 0 and 1", T=90, decays="hard"), 1


def all_runs() -> list[Run]:
    """bfloat16 on sm_90 first."""
    found = []
    for dtype in _DTYPES:
        for target in _TARGETS:
            for form, cases in (
                ("chunked", _chunked()),
                ("attention", _attention()),
                ("chunked", _deltas()),
            ):
                for case, num_candidates in cases:
                    long = case.name.endswith("long chunks")
                    if dtype != "bfloat16":
                        # The second walks through the sequences.
                        num_candidates = 2 if case is _CONTINUED else 1
                    for candidate in range(num_candidates):
                        run = Run(
                            case=replace(case, dtype=dtype),
                            form=form,
                            target=target,
                            candidate=candidate,
                            chunk_size=256 if long else 64,
                        )
                        found.append(run)
            for case in _steps():
                found.append(Run(case=replace(case, dtype=dtype), form="step", target=target))
            for case in _others():
                (form,) = case.forms
                found.append(Run(case=replace(case, dtype=dtype), form=form, target=target))
    return found


# What `make test-all` executes; `make soak` executes everything.
WIDE = (
    "chunked, p2 K64, bfloat16, sm_90, candidate 0",
    "loss, 257 ids, bfloat16, sm_90, candidate 0",
    "rotation, odd sizes, bfloat16, sm_90, candidate 0",
    "chunked, packed, continued, two groups, bfloat16, sm_90, candidate 1",
    "chunked, p4 K16, bfloat16, sm_90, candidate 0",
    "chunked, wide strides, float16, sm_90, candidate 0",
    "attention, packed, two groups, bfloat16, sm_90, candidate 0",
    "step, p2 K64, bfloat16, sm_90, candidate 0",
    "step, p2 K64, bfloat16 state, in place, bfloat16, sm_90, candidate 0",
    "chunked, p2, a sum without gates, float32, sm_80, candidate 0",
    "chunked, delta rule, packed, continued, gates scalar, bfloat16, sm_90, candidate 1",
    "chunked, delta rule, gates channel, nothing is erased, bfloat16, sm_90, candidate 1",
)


def runs_of(suite: str) -> list[Run]:
    everything = all_runs()
    if suite == "all":
        return everything
    by_name = {run.name: run for run in everything}
    return [by_name[name] for name in WIDE]
