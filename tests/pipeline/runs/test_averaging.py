"""`longhaul average`: the mean of a run's last checkpoints, as a run folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.cli import main
from longhaul.pipeline.runs.averaging import average
from longhaul.pipeline.runs.folder import RunFolder, stored_config
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = checkpoint.glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def uninterrupted(uninterrupted: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy with a store of its own: the evaluation of a mean is tracked as another run."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(uninterrupted.path, folder, dirs_exist_ok=True)
    config = folder / "small" / "config.yaml"
    config.write_text(config.read_text().replace(str(uninterrupted.path), str(folder)))
    return type(uninterrupted)(folder)


@pytest.fixture(scope="module")
def averaged(uninterrupted: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mean of the two checkpoints that are left of the run of 30 updates."""
    target = tmp_path_factory.mktemp("averaged") / "mean"
    assert average(uninterrupted.path / "small", target) == [28, 30]
    return target


def test_every_weight_is_the_mean_in_float64(averaged: Path, uninterrupted: Run) -> None:
    checkpoints = uninterrupted.path / "small" / "checkpoints"
    one, other = (weights(checkpoints / f"step-{step:09d}") for step in (28, 30))
    found = weights(averaged / "checkpoints" / "step-000000030")
    assert found.keys() == one.keys()
    for name, tensor in found.items():
        wanted = ((one[name].double() + other[name].double()) / 2).float()
        assert torch.equal(tensor, wanted), name
    assert any(not torch.equal(found[name], other[name]) for name in found)


def test_it_is_a_run_that_is_evaluated_and_has_its_config_and_data(
    averaged: Path, uninterrupted: Run
) -> None:
    run = RunFolder(uninterrupted.path / "small")
    config, source = stored_config(RunFolder(averaged)), stored_config(run)
    assert (config.name, config.root) == ("mean", str(averaged.parent))
    assert (config.model, config.data, config.tracking) == (
        *(source.model, source.data),
        source.tracking,
    )
    assert (averaged / "environment.json").read_bytes() == run.environment_file.read_bytes()
    result = uninterrupted.longhaul("evaluate", str(averaged), "--tasks", "positions")
    assert "step 30, " in result.stdout
    (results,) = averaged.glob("evaluation/step-000000030/results.json")
    assert 2 < json.loads(results.read_text())["evaluation/loss"] < 6
    # The checkpoints are two updates apart: their mean is about as good as they are.
    trained = [load_trained_model(path).model for path in (averaged, run.path)]
    tokens = torch.arange(256).view(4, 64)
    with torch.no_grad():
        losses = [model.loss(tokens, tokens.roll(-1, 1)).item() for model in trained]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.wide
def test_it_is_exported_with_the_steps_that_it_is_the_mean_of(
    averaged: Path, uninterrupted: Run, tmp_path: Path
) -> None:
    uninterrupted.longhaul("export", str(averaged), str(tmp_path / "exported"))
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| weights | the mean of those after the updates 28, 30 |" in card


@pytest.mark.wide
def test_a_new_run_begins_with_it_and_it_is_not_resumed(
    averaged: Path, run: Run, uninterrupted: Run
) -> None:
    source = f"trainer.start_from={averaged}"
    result = run.longhaul("train", "small.yaml", source, "trainer.max_tokens=512")
    assert f"the run begins with the weights of {averaged}/checkpoints/step-0" in result.stderr
    config = str(averaged / "config.yaml")
    store = f"tracking.uri=sqlite:///{uninterrupted.path}/mlflow.db"  # named, for later calls too
    assert "mean is finished: 15,360 tokens" in run.longhaul("train", config, store).stdout
    before = {path: path.read_bytes() for path in averaged.glob("*.*")}
    refused = run.longhaul("train", config, "trainer.max_tokens=20480", check=False)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert "step-000000030: found weights alone, wanted the optimizer's state too" in line
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_up_to_one_of_them(uninterrupted: Run, tmp_path: Path) -> None:
    run = tmp_path / "small"
    shutil.copytree(uninterrupted.path / "small", run)
    shutil.copytree(run / "checkpoints/step-000000028", run / "checkpoints/step-000000020")
    assert average(run / "checkpoints/step-000000028", tmp_path / "a") == [20, 28]
    assert average(run, tmp_path / "b", 3) == [20, 28, 30]
    (damaged,) = (run / "checkpoints/step-000000020").glob("model-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="step-000000020 is damaged"):
        average(run, tmp_path / "c", 3)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small", "mean", "--last", "3"], "--last: found 2 checkpoints in /.*, wanted 3; check"),
        (["small", "mean", "--last", "1"], "--last: found 1, wanted 2 or more"),
        (["small", "small"], "small: found .* wanted a new or empty folder"),
        (["nowhere", "mean"], "nowhere: found no such folder"),
    ],
)
def test_what_cannot_be_averaged_is_one_line(
    arguments: list[str],
    message: str,
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(uninterrupted.path)
    assert main(["average", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"longhaul: {message}", line), line
    assert not (uninterrupted.path / "mean").exists()
