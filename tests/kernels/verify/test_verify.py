"""The GPU check run on a CPU at small sizes: every check, every measurement, the whole report."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import Config
from triton.runtime.autotuner import Autotuner

from longhaul.kernels.testing import compare
from longhaul.kernels.verify import benchmark, cases
from longhaul.kernels.verify import report as reporting
from longhaul.kernels.verify.__main__ import main
from longhaul.kernels.verify.benchmark import Sizes, Task, untimed_tuning
from longhaul.kernels.verify.cases import Case
from longhaul.kernels.verify.peers import RETENTION_CHUNKS, Shape
from longhaul.kernels.verify.processes import OUT_OF_TIME, Outcome, run_tasks

TOY = Sizes(
    case_tokens=40,
    case_width=8,
    tokens=64,
    attention_tokens=64,
    crossover_tokens=(32, 64),
    heads=2,
    widths=(16, 8),
    decoding_batch=2,
    matmul=32,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("verify") / "verify.json"
    reporting.run("cpu", TOY, num_processes=0, out=out)
    # Read from the file, to test that it is valid JSON.
    found: dict[str, Any] = json.loads(out.read_text(), parse_constant=refuse)
    return found


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def test_every_check_passes_on_the_torch_backend(report: dict[str, Any]) -> None:
    assert report["passed"]
    assert [one["faults"] for one in report["checks"] if one["faults"]] == []
    seen = {(one["dtype"], one["form"]) for one in report["checks"]}
    forms = ("chunked", "attention", "step")
    assert seen == {(dtype, form) for dtype in cases.DTYPES for form in forms}
    (packed,) = (
        one
        for one in report["checks"]
        if (one["name"], one["dtype"], one["form"]) == ("packed", "float32", "chunked")
    )
    grads = {"dq", "dk", "dv", "dlog_g", "dkv", "dnorm"}
    assert set(packed["tensors"]) == grads | {"out", "final kv", "final norm"}
    for found in packed["tensors"].values():
        assert found["error"] <= found["allowed"] <= 0.05


def test_the_report_has_times_of_everything_installed(report: dict[str, Any]) -> None:
    assert report["versions"]["torch"] == torch.__version__
    for one in report["measurements"]:
        if one["implementation"] == "chunk_simple_gla" or one["implementation"].startswith(
            "retention"
        ):
            continue  # not installed here, or needs a GPU
        assert one["problem"] is None, one
        if one["what"] == "profile":
            assert one["result"]["kernels"][0]["ms"] > 0
        elif one["what"] == "training":
            assert one["result"]["forward_ms"] > 0
            assert one["result"]["forward_backward_ms"] > 0
        else:
            assert one["result"]["ms"] > 0
    unknown = [one["name"] for one in report["targets"] if one["met"] is None]
    assert len(unknown) == 3, "two peers and the memory of a GPU are missing"
    assert "checks pass" in reporting.summary(report)


def test_a_missing_peer_is_reported(report: dict[str, Any]) -> None:
    peers = [one for one in report["measurements"] if one["implementation"].startswith("retention")]
    assert len(peers) == len(RETENTION_CHUNKS)
    for one in peers:
        assert one["result"] is None
        assert one["problem"]


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dlog_g", "dkv", "dnorm", "final kv"])
@pytest.mark.parametrize("harm", ["a wrong value", "a NaN", "noise"])
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, name: str, harm: str) -> None:
    case = Case(name="packed", T=40, K=8, V=8, documents=(0, 9), is_continued=True)
    run = Case.run

    def harmed(self: Case, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
        results = run(self, inputs, dtype, **how)
        if how["backend"] == "torch":
            x = results[name] = results[name].clone()
            worst = x.flatten().abs().argmax()
            if harm == "a wrong value":
                x.view(-1)[worst] *= 1.2
            elif harm == "a NaN":
                x.view(-1)[3] = torch.nan
            else:
                x += 1e-4 * torch.randn_like(x) * x.abs().max()
        return results

    monkeypatch.setattr(Case, "run", harmed)
    (record,) = cases.check(replace(case, forms=("chunked",)), CPU, "torch")
    assert any(fault.startswith(f"{name}: ") for fault in record["faults"])


@pytest.mark.usefixtures("unchecked")
def test_a_call_that_raises_is_recorded() -> None:
    case = Case(name="plain", T=20, K=8, V=8, forms=("chunked", "unknown"))
    good, bad = cases.check(case, CPU, "torch")
    assert good["faults"] == []
    assert bad["faults"][0].startswith("ValueError: form: found 'unknown'")


def test_a_write_to_an_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Case.run

    def writing(self: Case, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
        results = run(self, inputs, dtype, **how)
        if how["backend"] == "torch":
            inputs["v"] += 1
        return results

    monkeypatch.setattr(Case, "run", writing)
    case = Case(name="plain", T=20, K=8, V=8, forms=("chunked",))
    (record,) = cases.check(case, CPU, "torch")
    assert "v: an input was written to" in record["faults"]
    assert "out: differs when run again" in record["faults"]


def test_with_wide_strides_tokens_pass_two_to_the_31_elements() -> None:
    x = torch.empty(1, 131_073, 2, 64, dtype=torch.bfloat16, device="meta")
    assert cases._with_wide_strides(x).stride(1) * 131_072 > 2**31


def test_long_sequences_are_not_compared_with_the_quadratic_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_case: Case, _inputs: dict[str, Tensor], _dtype: torch.dtype, **how: Any) -> Any:
        return {how["backend"]: torch.empty(0)}

    monkeypatch.setattr(Case, "run", run)
    for case in [*cases.core_cases(), *cases.extreme_cases("triton")]:
        backend = "torch" if case.T > 2048 or (case.degree > 2 and case.K == 64) else "reference"
        assert list(case.expected({}, torch.float64)) == [backend]


def test_comparison_never_passes_an_oracle_that_is_not_a_number() -> None:
    x = torch.ones(3)
    assert compare(x, torch.tensor([1.0, torch.nan, 1.0]).double(), x, multiple=2.0).fault


def test_checks_run_in_other_processes() -> None:
    case = Case(name="plain", T=20, K=8, V=8)
    (outcome,) = run_tasks(
        partial(reporting._check_or_compile, "cpu"),
        [case],
        num_processes=1,
        deadline=time.monotonic() + 120,
    )
    assert outcome.problem is None
    assert [record["faults"] for record in reporting._checks(case, outcome)] == [[], []]


def test_an_unfinished_case_is_a_failure() -> None:
    case = Case(name="plain")
    records = reporting._checks(case, Outcome(None, OUT_OF_TIME))
    assert [record["faults"] for record in records] == [[OUT_OF_TIME]] * 2
    assert [record["form"] for record in records] == ["chunked", "attention"]


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
    launched.clear()
    with untimed_tuning():
        tuner[(1,)](3)
    assert launched == [16]
    assert tuner.cache == {}


def test_kernels_are_compiled_beforehand_for_every_measurement() -> None:
    tasks = benchmark.tasks_of(TOY, "cpu")
    compilations = benchmark.compilations_of(tasks)
    assert {job.task.row for job in compilations} == {
        "degree 2, K 64",
        "degree 1, K 64",
        "degree 2, K 32",
        "attention form",
        "decoding",
    }
    for job in compilations:
        if job.task.implementation == "longhaul":
            job.run()


def measured(**times: float) -> list[dict[str, Any]]:
    task = Task(what="training", row="degree 2, K 64", shape=Shape())
    names = {"ours": "longhaul", "sdpa": "sdpa flash", "r256": "retention, chunk 256"}
    names["r512"] = "retention, chunk 512"
    return [
        reporting._measurement(
            replace(task, implementation=names[implementation]),
            Outcome({"forward_backward_ms": ms}, None),
        )
        for implementation, ms in times.items()
    ]


def value_of(measurements: list[dict[str, Any]], text: str) -> tuple[float | None, bool | None]:
    (one,) = (one for one in reporting.targets_of(measurements) if text in one["name"])
    return one["value"], one["met"]


def test_targets_are_ratios_of_measured_times() -> None:
    times = measured(ours=5, sdpa=45, r256=14, r512=10)
    assert value_of(times, "K 64: times faster than SDPA") == (9.0, True)
    assert value_of(times, "than retention") == (2.0, False)
    assert value_of(times, "matmul") == (None, None)


@pytest.mark.parametrize(
    ("ours", "crossover"), [((9, 9, 9), None), ((9, 1, 1), 2048), ((1, 9, 1), 4096)]
)
def test_the_crossover_is_where_it_stays_faster(
    ours: tuple[int, ...], crossover: int | None
) -> None:
    measurements = [
        reporting._measurement(
            Task(what="training", row=f"T {T}", implementation=implementation, shape=Shape(T=T)),
            Outcome({"forward_backward_ms": ms}, None),
        )
        for T, mine in zip((1024, 2048, 4096), ours, strict=True)
        for implementation, ms in (("longhaul", mine), ("sdpa flash", 5))
    ]
    value, met = value_of(measurements, "tokens from which it")
    assert (value, met) == (crossover, crossover is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "verify.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
