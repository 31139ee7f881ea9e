"""What the strategies refuse; test_parallel.py trains with each."""

from types import SimpleNamespace
from typing import Any

import pytest

from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.training.strategies import DeepSpeedZero


def test_moments_without_a_step_are_refused_before_anything_is_restored() -> None:
    saved: Any = SimpleNamespace(path="RUN/step_5", tensors={"optimizer/head/exp_avg": None})
    unused: Any = None
    with pytest.raises(CheckpointError, match="RUN/step_5: found no parameter's step"):
        DeepSpeedZero.restore(unused, unused, unused, saved)
