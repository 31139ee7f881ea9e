"""Evaluation on several devices, and during training."""

import csv
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.runs import ranks
from longhaul.pipeline.runs.ranks import RankFailedError, Ranks
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
SHARED = ("positions", "context", "perplexity", "passkey", "recall")
LENGTHS = ("--contexts", "32,64", "--stride", "16", "--lengths", "256", "--prompts", "5")


def _tables(folder: Path) -> dict[str, list[list[float | str]]]:
    return {
        file.stem: [list(map(_number_or_word, row)) for row in list(csv.reader(file.open()))[1:]]
        for file in sorted(folder.glob("*.csv"))
    }


def _number_or_word(cell: str) -> float | str:
    return cell if cell.isalpha() else float(cell)


def test_a_share_is_every_other_piece() -> None:
    shares = [list(Ranks(index, 3).share(range(7))) for index in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.wide
def test_two_devices_find_what_one_does(uninterrupted: Run) -> None:
    folder = uninterrupted.path / "small" / "evaluation" / "step-000000030"
    arguments = ("evaluate", "small", "--tasks", ",".join((*SHARED, "bigram")), "--again", *LENGTHS)
    uninterrupted.longhaul(*arguments)
    alone = _tables(folder)
    result = uninterrupted.longhaul(*arguments, "--devices", "2")
    together = _tables(folder)
    assert set(alone) >= set(SHARED)
    for name, rows in alone.items():
        assert len(rows) == len(together[name])
        for one, two in zip(rows, together[name], strict=True):
            # The same sums in another order, printed with six digits.
            assert one == pytest.approx(two, abs=2e-6)
    assert result.stdout.count("evaluation/bigram_loss") == 1


def _lines_of_children(pid: int) -> list[str]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return found


def test_an_interrupt_is_one_line(uninterrupted: Run) -> None:
    process = uninterrupted.start("evaluate", "small", "--devices", "2", "--again")
    # In the moment in which the other process starts, where an interrupt would be lost most easily.
    while not any("spawn_main" in line for line in _lines_of_children(process.pid)):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.end() == (130, "longhaul: interrupted\n")


@pytest.mark.wide
def test_bad_input_of_several_devices_is_one_line(uninterrupted: Run) -> None:
    result = uninterrupted.longhaul(
        *("evaluate", "small", "--tasks", "passkey", "--prompts", "2", "--devices", "2"),
        check=False,
    )
    assert result.returncode == 2
    assert (
        result.stderr
        == "longhaul: --prompts: found 2, wanted 5 or more with passkey, one per depth\n"
    )
    # Found by the first alone.
    result = uninterrupted.longhaul(
        *("evaluate", "small", "--tasks", "lm-eval", "--positions", "linear", "--factor", "2"),
        *("--devices", "2"),
        check=False,
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.wide
def test_training_evaluates_and_goes_on_as_if_it_had_not(run: Run, uninterrupted: Run) -> None:
    run.longhaul(
        *("train", "small.yaml", "evaluation.tasks=[positions,recall,bigram]"),
        "evaluation.every_tokens=5120",
    )
    mine, other = (load_trained_model(one.path / "small").model for one in (run, uninterrupted))
    for name, value in other.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value), name
    folder = run.path / "small" / "evaluation"
    steps = sorted(path.name for path in folder.iterdir())
    assert steps == ["step-000000010", "step-000000020", "step-000000030"]
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    for name in ("evaluation/loss", "evaluation/recall_000004", "evaluation/bigram_loss"):
        history = client.get_metric_history(run_id, name)
        assert [metric.step for metric in history] == [10, 20, 30]
        values = [json.loads((folder / step / "results.json").read_text())[name] for step in steps]
        assert [metric.value for metric in history] == pytest.approx(values)


@pytest.mark.wide
def test_a_model_that_ranks_shard_is_measured_whole(run: Run) -> None:
    tasks = ("positions", "passkey", "recall")
    run.longhaul(
        *("train", "small.yaml", "trainer.max_tokens=5120", "trainer.micro_batch=2"),
        *("trainer.strategy=fsdp", "trainer.devices=2", f"evaluation.tasks=[{','.join(tasks)}]"),
    )
    folder = run.path / "small" / "evaluation" / "step-000000010"
    during = _tables(folder)
    assert set(during) == {*tasks, "loss_in_bins"}
    run.longhaul("evaluate", "small", "--tasks", ",".join(tasks), "--again")
    for name, rows in _tables(folder).items():
        for one, two in zip(rows, during[name], strict=True):
            assert one == pytest.approx(two, abs=2e-6)


@pytest.mark.wide
def test_ranks_share_an_evaluation_in_training_and_survive_one_that_fails_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_FAILING_TASK", "1:recall")
    tasks = "evaluation.tasks=[positions,recall,bigram]"
    two_ranks = ("trainer.strategy=ddp", "trainer.devices=2", "trainer.micro_batch=2")
    result = run.longhaul("train", "small.yaml", "trainer.max_tokens=1024", tasks, *two_ranks)
    assert "the evaluation task recall failed: rank 1 failed: RuntimeError: no such luck" in (
        result.stderr
    )
    (folder,) = (run.path / "small" / "evaluation").iterdir()
    during = _tables(folder)
    assert set(during) == {"positions", "loss_in_bins"}
    assert "evaluation/bigram_loss" in json.loads((folder / "results.json").read_text())
    run.longhaul("evaluate", "small", "--tasks", "positions", "--again")
    alone = _tables(folder)
    for name in during:
        for one, two in zip(alone[name], during[name], strict=True):
            # The same sums in another order, printed with six digits.
            assert one == pytest.approx(two, abs=2e-6)


class _Meeting:
    """Stands for gloo between threads."""

    def __init__(self, count: int) -> None:
        self._given: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=20)
        self.rank = threading.local()

    def all_gather_object(self, of_all: list[Any], own: Any, group: Any) -> None:
        self._given[self.rank.index] = own
        self._barrier.wait()
        of_all[:] = self._given
        self._barrier.wait()


@pytest.mark.parametrize(
    ("failing", "wanted"),
    [
        ({}, [None, None, None]),
        ({1: 0}, ["rank 1 failed: ValueError: 0"] * 3),
        ({1: 1}, ["rank 1 failed: ValueError: 1"] * 3),
        ({0: 2}, ["rank 0 failed: ValueError: 2"] * 3),
        ({0: 1, 2: 1}, ["rank 0 failed: ValueError: 1; rank 2 failed: ValueError: 1"] * 3),
    ],
)
def test_where_one_rank_fails_all_stop_and_none_waits(
    monkeypatch: pytest.MonkeyPatch, failing: dict[int, int], wanted: list[str | None]
) -> None:
    """Ranks in `failing` raise before the gather of that number, of which there are two."""
    meeting = _Meeting(3)
    monkeypatch.setattr(ranks, "dist", meeting)

    def work(index: int) -> str | None:
        meeting.rank.index = index
        mine = Ranks(index, 3)
        try:
            with mine.together():
                for number in range(3):
                    if failing.get(index) == number:
                        raise ValueError(number)
                    if number < 2:
                        assert mine.gather([index]) == [0, 1, 2]
        except RankFailedError as error:
            return str(error)
        except ValueError as error:
            return wanted[index] if error.args == (failing[index],) else str(error)
        # All can work together afterwards, too.
        assert mine.gather([index]) == [0, 1, 2]
        return None

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == wanted


def test_a_task_that_fails_is_told_and_training_goes_on(run: Run) -> None:
    # Documents of 1,024 tokens have no window of four times this context.
    small = ("data.context=512", "trainer.micro_batch=1", "data.validation_tokens=512")
    overrides = ("trainer.max_tokens=1024", "evaluation.tasks=[context,bigram]", *small)
    result = run.longhaul("train", "small.yaml", *overrides)
    assert "step-000000002: the evaluation task context failed: " in result.stderr
    (found,) = (run.path / "small" / "evaluation").iterdir()
    assert list(json.loads((found / "results.json").read_text())) == ["evaluation/bigram_loss"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.tasks=[positons]"], "evaluation.tasks: found 'positons', wanted some of"),
        (
            ["evaluation.tasks=[positions]", "data.validation_manifest=null"],
            "data.validation_manifest: missing with evaluation.tasks, wanted shards",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    run: Run, overrides: list[str], message: str
) -> None:
    result = run.longhaul("train", "small.yaml", *overrides, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (run.path / "small").exists()
