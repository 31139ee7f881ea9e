"""The measurements, run on a CPU at small sizes: every task, every target."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from longhaul.kernels.power.verify import benchmark, tasks
from longhaul.kernels.power.verify.benchmark import Task
from longhaul.kernels.power.verify.peers import RETENTION_CHUNKS, Shape, decoding_bytes
from longhaul.kernels.power.verify.targets import targets_of
from longhaul.kernels.power.verify.tasks import HEADLINE
from longhaul.kernels.verify.candidates import MOST_CANDIDATES, untimed_tuning

CPU = torch.device("cpu")


def small(task: Task) -> Task:
    T, K = min(task.shape.T, 64), task.shape.K // 4
    return replace(task, shape=replace(task.shape, T=T, B=1, H=2, K=K), size=32)


def test_everything_installed_is_measured() -> None:
    measured = {}
    for task in map(small, [*tasks.headline_tasks(), *tasks.op_tasks()]):
        if task.implementation == "sdpa cudnn":
            continue  # needs a GPU
        result = task.measure(CPU)
        measured[task] = result
        if task.what == "profile":
            assert result["kernels"][0]["ms"] > 0
        elif task.what == "training":
            assert result["forward_backward_ms"] > 0
            assert ("forward_backward_ms_graph" in result) == task.with_graph
        else:
            assert result["ms"] > 0
    unknown = [one["name"] for one in targets_of(measured) if one["met"] is None]
    assert len(unknown) == 3, "two peers and the memory of a GPU are missing"


def test_every_candidate_of_every_row_is_timed() -> None:
    found = [task for task in tasks.op_tasks() if task.candidate is not None]
    assert [task.candidate for task in found] == [*range(MOST_CANDIDATES)] * len(tasks.ROWS)


def test_a_candidate_without_room_on_the_chip_is_told_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(benchmark, "_kernel_times", refuse)
    found = small(next(task for task in tasks.op_tasks() if task.candidate == 1))
    assert "shared memory" in found.measure(CPU)["does_not_fit"]
    with pytest.raises(OutOfResources):
        replace(found, candidate=None).measure(CPU)


def test_retention_is_timed_compiled_too_and_its_tuning_is_shared() -> None:
    peers = tasks.peer_tasks()
    retention = [task for task in peers if task.implementation.startswith("retention")]
    assert len(retention) == 2 * len(RETENTION_CHUNKS)
    assert [one.implementation in tasks.COMPILED_BEFORE for one in retention].count(True) == 1
    assert {task.package for task in peers} == {"retention", "fla"}


def test_a_peer_that_is_missing_raises() -> None:
    for task in map(small, tasks.peer_tasks()):
        with pytest.raises(ImportError):
            task.measure(CPU)


def test_untimed_tuning_runs_the_given_part() -> None:
    launched: list[int] = []

    class Kernel:
        def fn(self) -> None: ...

        def run(self, *args: Any, BLOCK: int, **kwargs: Any) -> None:
            launched.append(BLOCK)

    kernel = Kernel()
    kernel.fn = Kernel.fn  # type: ignore[method-assign]
    configs = [Config({"BLOCK": n}) for n in (16, 32, 64, 128, 256)]
    tuner = Autotuner(kernel, ["x"], configs, ["x"], None, None)
    for part, expected in ((0, [16, 64, 256]), (1, [32, 128])):
        launched.clear()
        with untimed_tuning(part, 2):
            tuner[(1,)](3)
        assert launched == expected
    assert tuner.cache == {}


Results = dict[Task, dict[str, Any]]


def measured(**times: float) -> Results:
    task = Task(what="training", row=HEADLINE, shape=Shape())
    names = {"ours": "longhaul", "sdpa": "sdpa flash", "r256": "retention, chunk 256"}
    names["r512"] = "retention, compiled, chunk 512"
    return {
        replace(task, implementation=names[implementation]): {"forward_backward_ms": ms}
        for implementation, ms in times.items()
    }


def value_of(measurements: Results, text: str) -> tuple[float | None, bool | None]:
    (one,) = (one for one in targets_of(measurements) if text in one["name"])
    return one["value"], one["met"]


def test_targets_are_ratios_of_measured_times() -> None:
    times = measured(ours=5, sdpa=45, r256=14, r512=10)
    assert value_of(times, "K 64: times faster than SDPA") == (9.0, True)
    assert value_of(times, "than retention") == (2.0, False)
    assert value_of(times, "matmul") == (None, None)


def decoded(implementation: str) -> Task:
    return Task(what="decoding", row="decoding, batch 8", implementation=implementation)


def test_decoding_is_not_asked_to_be_faster_than_its_bytes() -> None:
    """B8 H8 K64, 65,536 tokens: 1,074 MB of keys and values, 76.7 MB of states read and written,
    38.9 MB in bfloat16. Six sevenths of the ratios 14 and 27.6 are wanted."""
    decoding = next(task for task in tasks.op_tasks() if task.what == "decoding")
    assert not decoding.with_graph  # it is always timed both ways
    names = ("longhaul, float32 state", "longhaul, bfloat16 state", "sdpa flash")
    ours, short, theirs = (decoding_bytes(name, decoding.shape) for name in names)
    assert (ours, short) == (pytest.approx(76.7e6, rel=1e-3), pytest.approx(38.9e6, rel=1e-3))
    found = targets_of(
        {
            decoded(names[0]): {"ms": 0.08, "ms_graph": 0.03, "bytes": ours},
            decoded(names[1]): {"ms": 0.08, "ms_graph": 0.02, "bytes": short},
            decoded("sdpa flash"): {"ms": 0.4, "ms_graph": 0.36, "bytes": theirs},
        }
    )
    found = [one for one in found if one["name"].startswith("decoding, batch 8")]
    assert [round(one["target"], 1) for one in found] == [12.0, 12.0, 23.6, 23.6]
    assert [round(one["value"], 1) for one in found] == [12.0, 5.0, 18.0, 5.0]


@pytest.mark.parametrize(
    ("ours", "crossover"), [((9, 9, 9), None), ((9, 1, 1), 2048), ((1, 9, 1), 4096)]
)
@pytest.mark.parametrize("suffix", ["", "_graph"])
def test_the_crossover_is_where_it_stays_faster(
    ours: tuple[int, ...], crossover: int | None, suffix: str
) -> None:
    found = {
        Task(what="training", row=f"T {T}", implementation=implementation, shape=Shape(T=T)): {
            f"forward_backward_ms{suffix}": ms
        }
        for T, mine in zip((1024, 2048, 4096), ours, strict=True)
        for implementation, ms in (("longhaul", mine), ("sdpa flash", 5))
    }
    how = "as a graph" if suffix else "eager"
    value, met = value_of(found, f"tokens from which it is faster than SDPA-flash, at most, {how}")
    assert (value, met) == (crossover, crossover is not None)
