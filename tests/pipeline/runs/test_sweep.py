"""The runs that the axes of a sweep describe."""

import pytest

from longhaul.configs import ConfigError
from longhaul.pipeline.runs.sweep import read_sweep


@pytest.mark.parametrize("axis", ["name=a,b", "root=a,b", "tracking.parent_run_id=a,b"])
def test_what_all_runs_share_is_no_axis(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"--sweep: found '{axis}', wanted another key"):
        read_sweep("run/demo.yaml", [], [axis])


@pytest.mark.parametrize(
    "axes",
    [["optim.learning_rate=1e-3,0.001"], ["trainer.seed=1,2", "trainer.seed=3"]],
)
def test_runs_differ_in_more_than_their_names(axes: list[str]) -> None:
    with pytest.raises(ConfigError, match="which are the same run, wanted values that differ"):
        read_sweep("run/demo.yaml", [], axes)
