"""Runs of several budgets that decay from one trunk (trainer.branch_from)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATE = 512
# 4 updates of warm-up; the last 4 updates of a budget decay, to a tenth.
WSD = (
    *("optim.schedule.name=wsd", f"optim.schedule.decay_tokens={4 * UPDATE}"),
    *(f"optim.schedule.warmup_tokens={4 * UPDATE}", "optim.schedule.final_factor=0.1"),
    "data.workers=0",
)
KEPT = (f"checkpoint.every_tokens={2 * UPDATE}", "checkpoint.keep_every=1")


def budget(updates: int) -> str:
    return f"trainer.max_tokens={updates * UPDATE}"


@pytest.fixture(scope="module")
def trunk(make_run: Callable[[int], Run]) -> Run:
    """Sixteen updates, with a checkpoint after every other one. The rate decays after twelve."""
    run = make_run(16)
    run.longhaul("train", "small.yaml", *WSD, *KEPT)
    return run


def branch(run: Run, trunk: Run, updates: int, *options: str, **settings: Any) -> Any:
    source = f"trainer.branch_from={trunk.path}/small"
    return run.longhaul("train", "small.yaml", *WSD, source, budget(updates), *options, **settings)


def tensors(folder: Path, group: str) -> dict[str, torch.Tensor]:
    files = max((folder / "checkpoints").iterdir()).glob(f"{group}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found: Path, wanted: Path) -> None:
    for group in ("model", "optimizer", "rng"):
        one, other = tensors(found, group), tensors(wanted, group)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), group


def rates(run: Run) -> dict[int, float]:
    """The learning rates in MLflow by step."""
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "tests")
    (tracked,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(tracked.info.run_id, "train/learning_rate")
    return {metric.step: metric.value for metric in history}


def wsd(step: int, updates: int) -> float:
    """The rate of the update that ends at a step, from the definition."""
    before = step - 1
    if before < 4:
        return 3e-3 * before / 4
    return 3e-3 * (1 - 0.9 * max(0, before - (updates - 4)) / 4)


def test_a_branch_is_the_run_that_trains_alone_to_its_budget(
    trunk: Run, run: Run, make_run: Callable[[int], Run]
) -> None:
    alone = make_run(11)
    alone.longhaul("train", "small.yaml", *WSD, budget(11))
    # Its decay begins after 7 updates: the newest checkpoint before that is of 6.
    result = branch(run, trunk, 11)
    assert "resumed at step 6" in result.stdout
    log = (run.path / "small" / "logs" / "train.log").read_text()
    assert f"the run goes on from {trunk.path}/small/checkpoints/step-000000006" in log
    assert_same(run.path / "small", alone.path / "small")
    assert json.loads((run.path / "small" / "DONE").read_text())["tokens"] == 11 * UPDATE
    # One curve of rates from the warm-up to the end, of which the branch has its own part.
    assert rates(alone) == pytest.approx({step: wsd(step, 11) for step in range(1, 12)})
    assert rates(run) == pytest.approx({step: wsd(step, 11) for step in range(7, 12)})
    assert rates(trunk) == pytest.approx({step: wsd(step, 16) for step in range(1, 17)})


@pytest.mark.wide
def test_a_branch_is_resumed_as_any_run(
    trunk: Run, run: Run, make_run: Callable[[int], Run]
) -> None:
    alone = make_run(9)
    alone.longhaul("train", "small.yaml", *WSD, budget(9))
    (run.path / "small").mkdir()
    (run.path / "small" / "STOP").touch()
    assert branch(run, trunk, 9, check=False).returncode == 75
    (trunk.path / "small").rename(trunk.path / "elsewhere")
    try:
        result = branch(run, trunk, 9)
    finally:
        (trunk.path / "elsewhere").rename(trunk.path / "small")
    assert "resumed at step 5" in result.stdout
    assert_same(run.path / "small", alone.path / "small")


@pytest.mark.wide
def test_two_ranks_branch_off_as_one(trunk: Run, run: Run, make_run: Callable[[int], Run]) -> None:
    one = make_run(9)
    branch(one, trunk, 9)
    branch(run, trunk, 9, "trainer.strategy=fsdp", "trainer.devices=2")
    found, wanted = (load_trained_model(each.path / "small").model for each in (run, one))
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Four updates of decay begin before the first checkpoint.
        ([budget(5)], "found no intact checkpoint in {trunk}/small/checkpoints that fits, wanted "),
        (
            ["trainer.branch_from={trunk}/small/checkpoints/step-000000008", budget(11)],
            "found 4,096 tokens, wanted one of 3,584 tokens at most, where the decay begins",
        ),
        (
            ["trainer.branch_from={trunk}/small/checkpoints/step-000000014", budget(30)],
            "found 7,168 tokens, wanted one of 6,144 tokens at most, where the decay begins in ",
        ),
        (["optim.learning_rate=1"], "optim.learning_rate: found 1.0, wanted 0.003 as in {trunk}"),
        (["optim.schedule.warmup_tokens=5"], "optim.schedule.warmup_tokens: found 5, wanted 2048"),
        (["model.width=64"], "model.width: found 64, wanted 32 as in"),
        (["trainer.branch_from=nowhere"], "/"),
        (
            ["optim.schedule.name=cosine", "optim.schedule.decay_tokens=0"],
            "found with optim.schedule.name cosine, wanted null, or wsd, which decays last",
        ),
    ],
)
def test_what_is_no_trunk_is_one_line(
    options: list[str], message: str, trunk: Run, run: Run
) -> None:
    given = [option.format(trunk=trunk.path) for option in options]
    result = branch(run, trunk, 12, *given, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"longhaul: trainer.branch_from: {message.format(trunk=trunk.path)}")
    assert not (run.path / "small").exists()


def test_other_data_are_refused(trunk: Run, run: Run, corpus: Path) -> None:
    result = branch(run, trunk, 12, f"data.manifest={corpus}/validation", check=False)
    assert result.returncode == 2, result.stderr
    assert "data.manifest: found other shards in" in result.stderr.splitlines()[-1]


@pytest.mark.wide
def test_a_run_that_decays_otherwise_is_no_trunk(run: Run, make_run: Callable[[int], Run]) -> None:
    cosine = make_run(4)
    cosine.longhaul("train", "small.yaml")
    result = branch(run, cosine, 12, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "found optim.schedule.name cosine in" in line
