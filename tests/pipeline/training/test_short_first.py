"""A run whose first updates have shorter contexts (data.short_first)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATE, UPDATES = 512, 12
# Four updates of pieces of 16 tokens, four of 32, and then whole samples of 64.
SHORT = (
    "data.short_first=[{context: 16, until_tokens: 2048}, {context: 32, until_tokens: 4000}]",
    f"trainer.max_tokens={UPDATES * UPDATE}",
    "data.workers=0",
)


@pytest.fixture(scope="module")
def whole(make_run: Callable[[int], Run]) -> Run:
    """A run that nothing interrupts."""
    run = make_run(UPDATES)
    run.longhaul("train", "small.yaml", *SHORT)
    return run


def tensors(run: Run, group: str = "model") -> dict[str, torch.Tensor]:
    files = max((run.path / "small" / "checkpoints").iterdir()).glob(f"{group}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def batches(run: Run) -> dict[tuple[int, int], int]:
    """Checksum of every micro-batch by step and first sample."""
    lines = map(json.loads, run.trace.read_text().splitlines())
    return {(line["step"], line["index"][0]): line["crc"] for line in lines}


def test_an_update_has_as_many_tokens_and_the_order_stays(
    whole: Run, make_run: Callable[[int], Run]
) -> None:
    plain = make_run(UPDATES)
    plain.longhaul("train", "small.yaml", *SHORT, "data.short_first=[]")
    assert batches(whole).keys() == batches(plain).keys()
    rows: dict[int, set[int]] = {}
    for line in map(json.loads, whole.trace.read_text().splitlines()):
        rows.setdefault(line["step"], set()).add(len(line["index"]))
    assert rows == {step: {16 if step < 4 else 8 if step < 8 else 4} for step in range(UPDATES)}
    done = json.loads((whole.path / "small" / "DONE").read_text())
    assert (done["step"], done["tokens"]) == (UPDATES, UPDATES * UPDATE)
    client = MlflowClient(f"sqlite:///{whole.path}/mlflow.db")
    (run_id,) = [(whole.path / "small" / "mlflow_run_id").read_text().strip()]
    told = {
        name: {one.step: one.value for one in client.get_metric_history(run_id, f"train/{name}")}
        for name in ("context", "tokens")
    }
    steps = range(1, UPDATES + 1)
    assert told["context"] == {n: 16 if n <= 4 else 32 if n <= 8 else 64 for n in steps}
    assert told["tokens"] == {n: n * UPDATE for n in steps}
    # Validation is of whole samples in both.
    assert "validation/loss_at_000064" in client.get_run(run_id).data.metrics


def test_a_resumed_run_is_the_same_to_the_bit(whole: Run, make_run: Callable[[int], Run]) -> None:
    run = make_run(UPDATES)
    for stop_after in (2, 6):  # within each of the shorter contexts
        (run.path / "small").mkdir(exist_ok=True)
        process = run.start("train", "small.yaml", *SHORT)
        run.wait_for_step(process, stop_after)
        process.send_signal(15)
        process.communicate()
        assert process.returncode in (0, 75)
    run.longhaul("train", "small.yaml", *SHORT)
    assert batches(run) == batches(whole)
    for group in ("model", "optimizer"):
        found, wanted = tensors(run, group), tensors(whole, group)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.wide
@pytest.mark.parametrize("way", ["fsdp", "context"])
def test_two_ranks_train_as_one(whole: Run, make_run: Callable[[int], Run], way: str) -> None:
    run = make_run(UPDATES)
    options = ["trainer.strategy=ddp", "trainer.context_parallel=2"]
    if way == "fsdp":
        options = ["trainer.strategy=fsdp"]
    run.longhaul("train", "small.yaml", *SHORT, *options, "trainer.devices=2")
    found, wanted = (load_trained_model(one.path / "small").model for one in (run, whole))
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.short_first=[]"], "data.short_first: found "),
        (
            ["name=other", "data.short_first=[{context: 24, until_tokens: 9}]"],
            "data.short_first.0.context: found 24, wanted a divisor of data.context = 64",
        ),
        (
            [
                *("name=other", "data.short_first=[{context: 1, until_tokens: 9}]"),
                *("trainer.strategy=ddp", "trainer.devices=2", "trainer.context_parallel=2"),
            ],
            "trainer.context_parallel: found 2, wanted a divisor of data.short_first.0.context = 1",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(whole: Run, options: list[str], message: str) -> None:
    result = whole.longhaul("train", "small.yaml", *SHORT, *options, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"longhaul: {message}"), line
