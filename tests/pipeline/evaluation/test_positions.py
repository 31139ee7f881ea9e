"""Positions scaled on the command line: results apart, and one line where it makes no sense."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture(scope="module")
def trained(make_run: Callable[[int], Run]) -> Run:
    """A finished run of 30 updates, and its evaluation with positions as in training."""
    run = make_run(30)
    run.longhaul("train", "small.yaml")
    run.longhaul("evaluate", "small")
    return run


def test_results_with_scaled_positions_stand_beside_the_others(trained: Run) -> None:
    evaluation = trained.path / "small" / "evaluation"
    plain_folder = evaluation / "step-000000030"
    before = {path.name: path.read_bytes() for path in plain_folder.iterdir()}
    arguments = ("evaluate", "small", "--positions", "linear", "--factor", "4")
    assert "evaluation/linear-4/loss " in trained.longhaul(*arguments).stdout
    assert {path.name: path.read_bytes() for path in plain_folder.iterdir()} == before
    plain = json.loads(before["results.json"])["evaluation/loss"]
    values = json.loads((evaluation / "step-000000030-linear-4" / "results.json").read_text())
    assert {name.rsplit("/", 1)[0] for name in values} == {"evaluation/linear-4"}
    scaled = values["evaluation/linear-4/loss"]
    assert scaled != plain

    run_id = (trained.path / "small" / "mlflow_run_id").read_text().strip()
    client = MlflowClient(f"sqlite:///{trained.path}/mlflow.db")
    metrics = client.get_run(run_id).data.metrics
    assert metrics["evaluation/loss"] == pytest.approx(plain)
    assert metrics["evaluation/linear-4/loss"] == pytest.approx(scaled)
    found = {item.path for item in client.list_artifacts(run_id, "evaluation")}
    assert found == {"evaluation/step-000000030", "evaluation/step-000000030-linear-4"}

    model = load_trained_model(trained.path / "small")
    model.model.set_positions(PositionScaling(name="linear", factor=4.0))
    data = TokenDataModule(
        model.config.data, seed=0, samples_per_update=1, micro_batch=1, rank=0, world_size=1
    )
    with torch.no_grad():
        losses = [model.model.loss(b["input"], b["target"]) for b in data.val_dataloader()]
    assert torch.stack(losses).mean().item() == pytest.approx(scaled, abs=1e-5)


@pytest.mark.wide
def test_longer_windows_are_read_with_and_without_dynamic_ntk(trained: Run) -> None:
    folder = trained.path / "small" / "evaluation"
    longer = ("evaluate", "small", "--context", "128")
    trained.longhaul(*longer)
    trained.longhaul(*longer, "--positions", "dynamic_ntk", "--factor", "2.5")
    losses = []
    for label in ("context-128", "context-128-dynamic_ntk-2.5"):
        results = folder / f"step-000000030-{label}"
        assert len((results / "positions.csv").read_text().splitlines()) == 129
        key = f"evaluation/{label.replace('-dynamic', '/dynamic')}/loss"
        losses.append(json.loads((results / "results.json").read_text())[key])
    assert losses[0] != losses[1]
    assert load_trained_model(trained.path / "small", "dynamic_ntk", 2.5).positions.context == 64


@pytest.mark.wide
def test_generation_takes_interpolated_positions(trained: Run) -> None:
    arguments = ("generate", "small", "--prompt", "def ", "--tokens", "20")
    plain = trained.longhaul(*arguments)
    once = trained.longhaul(*arguments, "--positions", "linear", "--factor", "1")
    assert once.stdout == plain.stdout
    scaled = trained.longhaul(*arguments, "--positions", "linear", "--factor", "8")
    assert scaled.stdout.startswith("def ")
    prompt = torch.tensor([[256, *b"def "]])
    logits = [
        load_trained_model(trained.path / "small", "linear", factor).model.prefill(prompt)[0]
        for factor in (1.0, 8.0)
    ]
    assert not torch.equal(*logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "small", "--positions", "ntk", "--factor", "2"],
            "positions: found 'ntk', wanted one of none",
        ),
        (["evaluate", "small", "--factor", "2"], "--factor: found 2 with --positions none, wanted"),
        (["evaluate", "small", "--positions", "linear"], "--factor: found none with --positions"),
        (["evaluate", "small", "--context", "0"], "--context: found '0', wanted tokens, such as"),
        (["evaluate", "small", "--context", "1000000"], "--context: 1000000 does not divide the"),
        (
            ["evaluate", "small", "--tasks", "context", "--contexts", "4096"],
            "--contexts: 4096 does not divide the blocks",
        ),
        (
            ["evaluate", "small", "--positions", "dynamic_ntk", "--factor", "2"],
            "--context: found 64 with dynamic_ntk, which changes nothing",
        ),
        (
            ["evaluate", "small", "--positions", "linear", "--factor", "0.5"],
            "position factor: found 0.5, wanted 1 or more",
        ),
        (
            ["generate", "small", "--prompt", "a", "--positions", "dynamic_ntk", "--factor", "2"],
            "positions: found dynamic_ntk for a state of kind conformal_sympow",
        ),
    ],
)
def test_positions_that_make_no_sense_are_one_line(
    trained: Run, arguments: list[str], message: str
) -> None:
    result = trained.longhaul(*arguments, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"longhaul: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
