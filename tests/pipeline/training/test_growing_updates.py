"""Runs whose contexts (data.short_first) or updates (optim.larger_updates) grow."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

OPTIONS = {
    # Four updates of pieces of 16 tokens, four of 32, and then whole samples of 64.
    "contexts": (
        "data.short_first=[{context: 16, until_tokens: 2048}, {context: 32, until_tokens: 4000}]",
        *("trainer.max_tokens=6144", "data.workers=0"),
    ),
    # Of 512 tokens until 2,048 are trained, then of 1,024, and from 4,096 on of 1,536.
    "updates": (
        "optim.larger_updates=[{at_tokens: 2048, factor: 2}, {at_tokens: 4000, factor: 3}]",
        *("trainer.max_tokens=6144", "optim.schedule={name: constant, warmup_tokens: 1024}"),
        *("data.workers=0", "checkpoint.keep_every=1", "tracking.every_updates=2"),
    ),
}
SIZES = [1, 1, 1, 1, 2, 2, 3, 3]
ENDS = [1, 2, 3, 4, 6, 8, 11, 14]


@pytest.fixture(scope="module")
def trained(make_run: Callable[[int], Run]) -> Callable[[str], Run]:
    """A run of these options that nothing interrupts."""

    @cache
    def whole(what_grows: str) -> Run:
        run = make_run(12)
        run.longhaul("train", "small.yaml", *OPTIONS[what_grows])
        return run

    return whole


def tensors(run: Run, group: str) -> dict[str, torch.Tensor]:
    files = max((run.path / "small" / "checkpoints").iterdir()).glob(f"{group}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def batches(run: Run) -> list[tuple[int, int, int]]:
    """Step at which its update begins, first sample and checksum of each micro-batch."""
    lines = map(json.loads, run.trace.read_text().splitlines())
    return sorted({(line["step"], line["index"][0], line["crc"]) for line in lines})


def history(run: Run, metric: str) -> dict[int, float]:
    """Values of a metric by the step of their update."""
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    return {one.step: one.value for one in client.get_metric_history(run_id, metric)}


def test_shorter_contexts_leave_the_tokens_of_an_update_and_their_order(
    trained: Callable[[str], Run], make_run: Callable[[int], Run]
) -> None:
    run, plain = trained("contexts"), make_run(12)
    plain.longhaul("train", "small.yaml", *OPTIONS["contexts"], "data.short_first=[]")
    assert [one[:2] for one in batches(run)] == [one[:2] for one in batches(plain)]
    rows: dict[int, set[int]] = {}
    for line in map(json.loads, run.trace.read_text().splitlines()):
        rows.setdefault(line["step"], set()).add(len(line["index"]))
    assert rows == {step: {16 if step < 4 else 8 if step < 8 else 4} for step in range(12)}
    done = json.loads((run.path / "small" / "DONE").read_text())
    assert (done["step"], done["tokens"]) == (12, 6144)
    contexts = {n: 16 if n <= 4 else 32 if n <= 8 else 64 for n in range(1, 13)}
    assert history(run, "train/context") == contexts
    assert history(run, "train/tokens") == {n: n * 512 for n in range(1, 13)}
    assert history(run, "validation/loss_at_000064"), "validation is of whole samples"


def test_an_update_takes_the_next_samples_and_counts_as_several_steps(
    trained: Callable[[str], Run],
) -> None:
    run = trained("updates")
    starts = [end - size for end, size in zip(ENDS, SIZES, strict=True)]
    # Eight samples a step, four a micro-batch.
    wanted = [
        (start, first)
        for start, end in zip(starts, ENDS, strict=True)
        for first in range(8 * start, 8 * end, 4)
    ]
    assert [one[:2] for one in batches(run)] == wanted
    folder = run.path / "small"
    done = json.loads((folder / "DONE").read_text())
    assert (done["step"], done["tokens"]) == (14, 14 * 512)
    # Every four steps: what passes a multiple of four counts as one.
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-000000004", "step-000000008", "step-000000014"]
    # Recorded at every other step, or what passes it; the rate grows with the root of the size.
    rates = {2: 1.5e-3, 4: 3e-3, 6: 3e-3 * 2**0.5, 8: 3e-3 * 2**0.5, 11: 3e-3 * 3**0.5}
    assert history(run, "train/learning_rate") == pytest.approx({**rates, 14: rates[11]})
    assert list(history(run, "curves/validation_loss")) == [11, 14]


@pytest.mark.parametrize(
    ("what_grows", "stops"),
    [("contexts", (2, 6)), pytest.param("updates", (4, 8), marks=pytest.mark.wide)],
)
def test_a_resumed_run_is_the_same_to_the_bit(
    what_grows: str,
    stops: tuple[int, int],
    trained: Callable[[str], Run],
    make_run: Callable[[int], Run],
) -> None:
    """Stopped within each of the shorter contexts, and where larger updates begin."""
    run, whole = make_run(12), trained(what_grows)
    for step in stops:
        process = run.start("train", "small.yaml", *OPTIONS[what_grows])
        run.wait_for_step(process, step)
        process.send_signal(15)
        process.communicate()
        assert process.returncode in (0, 75)
    run.longhaul("train", "small.yaml", *OPTIONS[what_grows])
    assert batches(run) == batches(whole)
    for group in ("model", "optimizer"):
        found, wanted = tensors(run, group), tensors(whole, group)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("what_grows", "strategy"),
    [
        ("contexts", ("fsdp",)),
        ("contexts", ("ddp", "trainer.context_parallel=2")),
        *(("updates", (name,)) for name in ("ddp", "fsdp", "deepspeed")),
    ],
)
def test_two_ranks_train_as_one(
    what_grows: str,
    strategy: tuple[str, ...],
    trained: Callable[[str], Run],
    make_run: Callable[[int], Run],
) -> None:
    run = make_run(12)
    name, *options = strategy
    ranks = (f"trainer.strategy={name}", "trainer.devices=2", *options)
    run.longhaul("train", "small.yaml", *OPTIONS[what_grows], *ranks)
    found, wanted = (
        load_trained_model(one.path / "small").model for one in (run, trained(what_grows))
    )
    for parameter, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[parameter], tensor, rtol=1e-3, atol=2e-5)


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
def test_contexts_that_do_not_fit_are_one_line(
    trained: Callable[[str], Run], options: list[str], message: str
) -> None:
    result = trained("contexts").longhaul(
        "train", "small.yaml", *OPTIONS["contexts"], *options, check=False
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"longhaul: {message}"), line
