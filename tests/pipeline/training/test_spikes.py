"""A spike in one rank's loss: all skip the update, or the run goes back to a checkpoint."""

import json
import shutil
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.checkpoints.reader import SavedCheckpoint

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

OPTIONS = [
    "trainer.devices=2",
    "trainer.micro_batch=2",
    "data.workers=0",
    "optim.spike_sigma=8",
    "checkpoint.keep_last=30",
]
STRATEGIES = {
    "ddp": ["trainer.strategy=ddp"],
    "fsdp": ["trainer.strategy=fsdp"],
    **{
        f"deepspeed{stage}": ["trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}"]
        for stage in (1, 2, 3)
    },
}


def saved(run: Run, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    checkpoint = SavedCheckpoint(run.path / "small" / "checkpoints" / f"step-{step:09d}")
    tensors = {name: checkpoint.read_one(name) for name in checkpoint.tensors}
    return {k: v for k, v in tensors.items() if not k.startswith("rng/")}, checkpoint.state(
        dict[str, Any]
    )


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def samples(run: Run) -> list[int]:
    lines = run.trace.read_text().splitlines()
    return sorted(json.loads(line)["index"][0] for line in lines)


@pytest.mark.wide
def test_a_spike_is_skipped_on_all_ranks_and_written_down(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:25:spike")
    options = [*OPTIONS, "trainer.strategy=ddp", "checkpoint.every_tokens=512"]
    result = run.longhaul("train", "small.yaml", *options)
    assert "step 26 is skipped, samples 200 to 207: loss 5" in result.stderr
    (before, _), (after, state) = saved(run, 25), saved(run, 26)
    assert_equal(after, before)
    skip = {"step": 26, "first_sample": 200, "last_sample": 207, "is_spike": True}
    assert state["progress"]["skipped"] == [{**skip, "rewound_to": None}]
    assert not torch.equal(
        saved(run, 27)[0]["model/embedding.weight"], after["model/embedding.weight"]
    )
    assert samples(run) == list(range(0, 240, 2))
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    logged = {
        name: [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
        for name in ("skipped/first_sample", "skipped/last_sample", "skipped/is_spike")
    }
    assert [points[0] for points in logged.values()] == [(26, 200), (26, 207), (26, 1)]
    assert client.get_metric_history(run_id, "skipped/loss")[0].value > 50


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_spike_takes_the_run_back_to_its_checkpoint(
    run: Run, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:25:spike")
    # One checkpoint of each 13 updates: the second is of the update that goes back to the first.
    every = ["optim.on_spike=rewind", "checkpoint.every_tokens=6656"]
    options = [*OPTIONS, *STRATEGIES[strategy], *every]
    result = run.longhaul("train", "small.yaml", *options)
    assert "step 26 is skipped, samples 200 to 207" in result.stderr
    assert "back to the weights of step 13" in result.stderr
    (before, earlier), (after, state) = saved(run, 13), saved(run, 26)
    assert_equal(after, before)
    # What was an ordinary loss for these weights is no spike beside the later ones.
    assert state["progress"]["recent_losses"] == earlier["progress"]["recent_losses"]
    assert state["progress"]["step"] == 26
    assert state["progress"]["skipped"][0]["rewound_to"] == 13
    assert samples(run) == list(range(0, 240, 2))
    # What was put back in the middle of a run is all that a new process would have read.
    first_end, _ = saved(run, 30)
    checkpoints = run.path / "small" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000000030")
    (run.path / "small" / "DONE").unlink()
    run.longhaul("train", "small.yaml", *options)
    assert_equal(saved(run, 30)[0], first_end)
