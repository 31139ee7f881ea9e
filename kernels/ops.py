"""The ops that `longhaul verify` checks, and that kernels/offline compiles.

A new op is a subpackage of kernels with such cases and shapes, and an entry here.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from longhaul.kernels.cross_entropy import verify as cross_entropy
from longhaul.kernels.delta.verify import catalogue as delta
from longhaul.kernels.delta.verify import shapes as delta_shapes
from longhaul.kernels.power.verify import catalogue as power
from longhaul.kernels.power.verify.shapes import SHAPES
from longhaul.kernels.rotary import verify as rotary
from longhaul.kernels.verify.cases import Case


class Op(NamedTuple):
    """The calls of an op that are checked and compiled."""

    features: Callable[[str], Sequence[Case]]
    """Cases for everything that the op can do, in a dtype, less those of `headline`."""

    shapes: Mapping[str, Callable[[], None]]
    """Functions by name. Each runs launchers in every configuration on small CPU tensors of zeros,
    so that their kernels are compiled for every chip."""

    headline: Sequence[Case] = ()
    """The call that training makes, which is checked first."""

    extremes: Callable[[str], Sequence[Case]] = lambda backend: ()
    """Cases with overflow, cancellation or resets, for a backend."""

    long: Sequence[Case] = ()
    candidates: Sequence[Case] = ()
    """Cases that run every configuration of every kernel, not only that of the chip."""

    peers: Mapping[str, Sequence[Case]] = MappingProxyType({})
    """Cases that other projects' kernels run, by the name of the package to import."""


OPS = (
    Op(
        features=power.feature_cases,
        shapes={shape.name: shape.launch for shape in SHAPES},
        headline=power.headline_cases(),
        extremes=power.extreme_cases,
        long=power.long_cases(),
        candidates=power.candidate_cases(),
    ),
    Op(
        features=delta.feature_cases,
        shapes={shape.name: shape.launch for shape in delta_shapes.SHAPES},
        extremes=lambda backend: delta.extreme_cases(),
        long=delta.long_cases(),
        candidates=delta.candidate_cases(),
        peers={"fla": delta.peer_cases()},
    ),
    Op(features=cross_entropy.cases, shapes=cross_entropy.SHAPES),
    Op(features=rotary.cases, shapes=rotary.SHAPES),
)
