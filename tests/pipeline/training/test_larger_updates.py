"""A run whose updates grow (optim.larger_updates)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

# Of 512 tokens until 2,048 are trained, then of 1,024, and from 4,096 on of 1,536.
LARGER = (
    "optim.larger_updates=[{at_tokens: 2048, factor: 2}, {at_tokens: 4000, factor: 3}]",
    *("trainer.max_tokens=6144", "optim.schedule={name: constant, warmup_tokens: 1024}"),
    *("data.workers=0", "checkpoint.keep_every=1", "tracking.every_updates=2"),
)
SIZES = [1, 1, 1, 1, 2, 2, 3, 3]
ENDS = [1, 2, 3, 4, 6, 8, 11, 14]


@pytest.fixture(scope="module")
def whole(make_run: Callable[[int], Run]) -> Run:
    """A run that nothing interrupts."""
    run = make_run(12)
    run.longhaul("train", "small.yaml", *LARGER)
    return run


def tensors(run: Run, group: str) -> dict[str, torch.Tensor]:
    files = max((run.path / "small" / "checkpoints").iterdir()).glob(f"{group}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def batches(run: Run) -> list[tuple[int, int, int]]:
    """Step at which its update begins, first sample and checksum of each micro-batch."""
    lines = map(json.loads, run.trace.read_text().splitlines())
    return sorted({(line["step"], line["index"][0], line["crc"]) for line in lines})


def test_an_update_takes_the_next_samples_and_counts_as_several_steps(whole: Run) -> None:
    starts = [end - size for end, size in zip(ENDS, SIZES, strict=True)]
    # Eight samples a step, four a micro-batch.
    wanted = [
        (start, first)
        for start, end in zip(starts, ENDS, strict=True)
        for first in range(8 * start, 8 * end, 4)
    ]
    assert [(step, first) for step, first, _ in batches(whole)] == wanted
    folder = whole.path / "small"
    done = json.loads((folder / "DONE").read_text())
    assert (done["step"], done["tokens"]) == (14, 14 * 512)
    # Every four steps: what passes a multiple of four counts as one.
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-000000004", "step-000000008", "step-000000014"]
    client = MlflowClient(f"sqlite:///{whole.path}/mlflow.db")
    run_id = (folder / "mlflow_run_id").read_text().strip()
    rates = {
        one.step: one.value for one in client.get_metric_history(run_id, "train/learning_rate")
    }
    # Recorded at every other step, or what passes it; the rate grows with the root of the size.
    assert rates == pytest.approx(
        {2: 1.5e-3, 4: 3e-3, **dict.fromkeys((6, 8), 0.003 * 2**0.5), 11: 3e-3 * 3**0.5}
        | {14: 3e-3 * 3**0.5}
    )
    validated = client.get_metric_history(run_id, "curves/validation_loss")
    assert [one.step for one in validated] == [11, 14]


def test_a_resumed_run_is_the_same_to_the_bit(whole: Run, make_run: Callable[[int], Run]) -> None:
    run = make_run(12)
    for stop_in in (4, 8):  # the steps at which larger updates begin
        process = run.start("train", "small.yaml", *LARGER)
        run.wait_for_step(process, stop_in)
        process.send_signal(15)
        process.communicate()
        assert process.returncode in (0, 75)
    run.longhaul("train", "small.yaml", *LARGER)
    assert batches(run) == batches(whole)
    for group in ("model", "optimizer"):
        found, wanted = tensors(run, group), tensors(whole, group)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_two_ranks_train_as_one(whole: Run, make_run: Callable[[int], Run], strategy: str) -> None:
    run = make_run(12)
    ranks = (f"trainer.strategy={strategy}", "trainer.devices=2")
    run.longhaul("train", "small.yaml", *LARGER, *ranks)
    found, wanted = (load_trained_model(one.path / "small").model for one in (run, whole))
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-3, atol=2e-5)
