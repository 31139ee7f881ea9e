"""What `longhaul verify` and kernels/offline know of an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from longhaul.kernels.verify.cases import Case

DTYPES = ("bfloat16", "float16", "float32")


@runtime_checkable
class Shape(Protocol):
    """A call whose kernels are compiled for every chip."""

    @property
    def name(self) -> str: ...

    def launch(self) -> None:
        """Run its launchers with every configuration, on small tensors of zeros on the CPU."""


@runtime_checkable
class Measurement(Protocol):
    """A call that is timed, of the op or of a peer."""

    @property
    def name(self) -> str: ...

    @property
    def is_ours(self) -> bool:
        """Whether it runs this project's code, or PyTorch's alone."""

    @property
    def package(self) -> str | None:
        """The module that a peer is imported from; None if it needs none."""

    def compilations(self) -> Sequence[Any]:
        """What several processes compile before: each has a `part` and `run(device)`."""

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Times in milliseconds, and more. ImportError where a peer is not installed."""


class Measured(NamedTuple):
    """A measurement and its result, None if there is none."""

    task: Any
    result: Any


class Timings(NamedTuple):
    """The measurements of an op, and the speeds that are aimed at."""

    headline: Sequence[Measurement]
    others: Sequence[Measurement]
    peers: Sequence[Measurement]
    targets: Callable[[Sequence[Measured]], list[dict[str, Any]]]
    """Each target beside the measured value; None where a measurement is missing."""

    @property
    def tasks(self) -> list[Measurement]:
        return [*self.headline, *self.others, *self.peers]


class Op(NamedTuple):
    """The calls of an op that are checked, timed and compiled."""

    features: Callable[[str], Sequence[Case]]
    """Cases for everything that the op can do, in a dtype, less those of `headline`."""

    shapes: Sequence[Shape]
    headline: Sequence[Case] = ()
    """The call that training makes, which is checked first."""

    extremes: Callable[[str], Sequence[Case]] = lambda backend: ()
    """Cases with overflow, cancellation or resets, for a backend."""

    long: Sequence[Case] = ()
    candidates: Sequence[Case] = ()
    """Cases that run every configuration of every kernel, not only that of the chip."""

    timings: Timings | None = None
