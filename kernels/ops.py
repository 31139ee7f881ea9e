"""The ops that `longhaul verify` checks and times, and that kernels/offline compiles.

A new op is a subpackage of kernels with such cases and shapes, and an entry here.
"""

from longhaul.kernels.cross_entropy import verify as cross_entropy
from longhaul.kernels.power.verify import catalogue as power
from longhaul.kernels.power.verify import tasks
from longhaul.kernels.power.verify.shapes import SHAPES
from longhaul.kernels.power.verify.targets import targets_of
from longhaul.kernels.rotary import verify as rotary
from longhaul.kernels.verify.op import Op, Timings

OPS = (
    Op(
        features=power.feature_cases,
        shapes=SHAPES,
        headline=power.headline_cases(),
        extremes=power.extreme_cases,
        long=power.long_cases(),
        candidates=power.candidate_cases(),
        timings=Timings(
            headline=tasks.headline_tasks(tasks.Sizes()),
            others=tasks.op_tasks(tasks.Sizes()),
            peers=tasks.peer_tasks(tasks.Sizes()),
            targets=targets_of,
        ),
    ),
    Op(features=cross_entropy.cases, shapes=cross_entropy.SHAPES),
    Op(features=rotary.cases, shapes=rotary.SHAPES),
)
