"""The runs that the axes of a sweep describe."""

import argparse

import pytest

from longhaul.configs import ConfigError
from longhaul.pipeline.arguments import sweep_axes
from longhaul.pipeline.commands import train
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


def names(*axes: str) -> list[str]:
    return [config.name for config in read_sweep("run/demo.yaml", [], axes).configs]


def test_names_do_not_depend_on_the_order_of_options() -> None:
    kind, degree = "model.attention.kind=sympow,sympow_gated", "model.attention.degree=2,4"
    context = "data.context=256"
    expected = {
        f"demo-kind={kind}-degree={degree}-context=256"
        for kind in ("sympow", "sympow_gated")
        for degree in (2, 4)
    }
    assert set(names(kind, degree, context)) == set(names(context, degree, kind)) == expected


def test_keys_vary_together() -> None:
    together = "data.context,trainer.micro_batch=256:16,512:8"
    assert names(together, "trainer.seed=0,1") == [
        "demo-context=256-micro_batch=16-seed=0",
        "demo-context=256-micro_batch=16-seed=1",
        "demo-context=512-micro_batch=8-seed=0",
        "demo-context=512-micro_batch=8-seed=1",
    ]
    reversed_keys = "trainer.micro_batch,data.context=16:256,8:512"
    assert names(reversed_keys) == names(together)
    with pytest.raises(ConfigError, match=r"--sweep: found '512' for data.context,trainer.micro"):
        names("data.context,trainer.micro_batch=256:16,512")
    with pytest.raises(ConfigError, match=r"--sweep: found .* wanted another key"):
        names("trainer.seed,name=1:a")


def test_seeds_are_an_axis_that_can_grow() -> None:
    def seeds(*arguments: str) -> list[str]:
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        return sweep_axes(parser.parse_intermixed_args(["run/demo.yaml", *arguments]))

    assert seeds("--seeds", "3") == ["trainer.seed=0,1,2"]
    assert seeds("trainer.seed=7", "--seeds", "2") == ["trainer.seed=7,8"]
    kinds = "model.attention.kind=softmax,sympow"
    few, more = (names(*seeds("--sweep", kinds, "--seeds", count)) for count in "24")
    assert set(few) < set(more)
    assert seeds("--sweep", kinds) == [kinds]
    with pytest.raises(ValueError, match=r"--seeds: found with trainer.seed in --sweep"):
        seeds("--sweep", "trainer.seed=1,2", "--seeds", "2")
