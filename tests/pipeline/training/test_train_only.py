"""Runs that begin with another run's weights, and train a part of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.pipeline.runs.folder import RunFolder, stored_config

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

LEARNED = "model.attention.initial_state=learned"
ALONE = (LEARNED, "trainer.train_only=initial_state", "optim.schedule.name=constant")


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Run]) -> Run:
    """A finished run of two updates, its initial states zero."""
    run = make_run(2)
    run.longhaul("train", "small.yaml")
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """By names such as model/blocks.0.attention.key.weight."""
    files = max((folder / "checkpoints").iterdir()).glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def tune(run: Run, base: Run, *options: str, updates: int = 4, check: bool = True) -> Any:
    budget = f"trainer.max_tokens={512 * updates}"
    source = f"trainer.start_from={base.path}/small"
    return run.longhaul("train", "small.yaml", *ALONE, source, budget, *options, check=check)


def refused(result: Any, message: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"longhaul: {message}"), result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


@pytest.fixture(scope="module")
def tuned(make_run: Callable[[int], Run], base: Run) -> Run:
    """A run of four updates of the initial states alone."""
    run = make_run(4)
    tune(run, base)
    return run


def is_initial_state(name: str) -> bool:
    return "initial_state" in name.split(".")


def test_only_initial_states_are_trained(tuned: Run, base: Run) -> None:
    before, after = weights(base.path / "small"), weights(tuned.path / "small")
    learned = {name for name in after if is_initial_state(name)}
    assert {name.split(".")[1] for name in learned} == {"0", "1"}  # blocks
    assert before.keys() == after.keys() - learned
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    values = [after[name] for name in learned if name.endswith(".value")]
    assert all(value.abs().max() > 0 for value in values)  # they begin at zero
    checkpoint = max((tuned.path / "small" / "checkpoints").iterdir())
    saved = load_file(checkpoint / "optimizer-00000-000.safetensors")
    assert {f"model/{name.split('/')[1]}" for name in saved} == learned


@pytest.mark.wide
def test_two_sittings_are_one(tuned: Run, base: Run, make_run: Callable[[int], Run]) -> None:
    run = make_run(4)
    tune(run, base, updates=2)
    result = tune(run, base)
    assert "resumed at step 2" in result.stdout
    found, wanted = weights(run.path / "small"), weights(tuned.path / "small")
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.wide
def test_two_processes_train_initial_states_alone(
    tuned: Run, base: Run, make_run: Callable[[int], Run]
) -> None:
    run = make_run(4)
    tune(run, base, "trainer.strategy=ddp", "trainer.devices=2")
    found, wanted = weights(run.path / "small"), weights(tuned.path / "small")
    for name, value in wanted.items():
        if is_initial_state(name):
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(found[name], value), name


def test_what_a_run_began_with_is_fixed(tuned: Run, base: Run) -> None:
    stored = stored_config(RunFolder(tuned.path / "small")).trainer.start_from
    assert stored == f"{base.path}/small"
    begins = "trainer.start_from: found '/"
    refused(tune(tuned, base, "trainer.start_from=elsewhere", check=False), begins)
    trains = "trainer.train_only: found None, wanted 'initial_state' as in"
    refused(tune(tuned, base, "trainer.train_only=null", check=False), trains)


def test_a_relative_path_is_made_absolute_and_a_checkpoint_will_do(
    make_run: Callable[[int], Run], base: Run
) -> None:
    run = make_run(1)
    (run.path / "base").symlink_to(base.path / "small")
    source = "base/checkpoints/step-000000002"
    result = run.longhaul("train", "small.yaml", f"trainer.start_from={source}")
    message = f"the run begins with the weights of {run.path}/{source}"
    assert message in result.stderr
    assert message in (run.path / "small" / "logs" / "train.log").read_text()
    stored = stored_config(RunFolder(run.path / "small")).trainer.start_from
    assert stored == f"{run.path}/{source}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.start_from=nowhere"], "trainer.start_from: /.*nowhere: found no such folder"),
        (["model.width=64"], r"trainer.start_from: found model.width \d+ in /.*, wanted 64 as in"),
        (["model.layers=3"], "trainer.start_from: found model.layers 2 in /.*, wanted 3 as in"),
        (["model.attention.degree=4"], "trainer.start_from: found model.attention.degree 2 in /"),
        (["model.attention.kind=linear"], "trainer.start_from: found model.attention.* wanted "),
        (["trainer.start_from=null"], "trainer.start_from: missing with trainer.train_only"),
        (["model.attention.initial_state=zero"], "trainer.train_only: found 'initial_state' with"),
        (
            ["trainer.train_only=gate"],
            "trainer.train_only: found 'gate', wanted 'initial_state' or null",
        ),
    ],
)
def test_a_start_that_does_not_fit_is_one_line(
    options: list[str], message: str, run: Run, base: Run
) -> None:
    result = tune(run, base, *options, check=False)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert re.match(f"longhaul: {message}", result.stderr), result.stderr
    assert not (run.path / "small").exists()


@pytest.mark.wide
def test_a_hybrid_trains_the_initial_states_it_has(make_run: Callable[[int], Run]) -> None:
    run = make_run(2)
    last = "model.layer_attention.1.kind=softmax"
    first = "model.layer_attention.:1.kind=sympow"
    learned = "model.layer_attention.:1.initial_state=learned"
    run.longhaul("train", "small.yaml", "name=source", last, first)
    start = f"trainer.start_from={run.path}/source"
    command = ("train", "small.yaml", start, "trainer.train_only=initial_state")
    run.longhaul(*command, last, first, learned)
    names = {name for name in weights(run.path / "small") if is_initial_state(name)}
    assert {name.split(".")[1] for name in names} == {"0"}
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    tracked = MlflowClient(f"sqlite:///{run.path}/mlflow.db").get_run(run_id)
    assert tracked.data.tags["longhaul.attention"] == "sympow,softmax"
    assert tracked.data.params["model.layer_attention.:1.initial_state"] == "learned"
    # Later entries win, so their order belongs to the model.
    result = run.longhaul(*command, first, learned, last, check=False)
    refused(result, "model.layer_attention: found the order :1, 1, wanted 1, :1 as in /")
