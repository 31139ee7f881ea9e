"""The checks of the delta rule, run on a CPU at small sizes: they find what is wrong, no more."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longhaul.kernels.common.triton.launch import Candidates
from longhaul.kernels.delta import op
from longhaul.kernels.delta.triton import gradients, prepare, read, walk
from longhaul.kernels.delta.verify import catalogue, shapes, tasks
from longhaul.kernels.delta.verify.cases import DeltaCase
from longhaul.kernels.verify.cases import DTYPES, check

CPU = torch.device("cpu")


def records_of(case: DeltaCase) -> list[dict[str, Any]]:
    return check(case.shrunk(40, 8), CPU, case.backend(CPU))


def test_every_configuration_of_each_kernel_is_checked() -> None:
    values = (one for module in (gradients, prepare, read, walk) for one in vars(module).values())
    counts = {len(one.configs) for one in values if isinstance(one, Candidates)}
    assert counts == {shapes.NUM_CANDIDATES}
    checked = {case.candidate for case in catalogue.candidate_cases()}
    assert checked == set(range(shapes.NUM_CANDIDATES))


def test_a_check_compares_outputs_states_and_every_gradient() -> None:
    by_name = {
        case.name.removeprefix("delta rule, torch: "): case
        for case in catalogue.feature_cases("float32")
        if not case.needs_gpu
    }
    grads = {"dk", "dv", "dbeta", "dlog_g"}
    for name, wanted in (
        ("packed, gates channel", {"out", "final state", "dq", "dstate"} | grads),
        ("steps, gates scalar", {"out", "final state"}),
        ("summary, gates scalar", {"kept", "added"} | grads),
        ("carried on, gates none, nothing is erased",
         {"out", "final state", "dq", "dk", "dv", "dstate"}),
    ):  # fmt: skip
        for record in records_of(by_name[name]):
            assert record["faults"] == []
            assert set(record["tensors"]) == wanted


@pytest.mark.wide
def test_every_check_passes_on_the_torch_backend() -> None:
    cases = [case for dtype in DTYPES for case in catalogue.feature_cases(dtype)]
    for case in [*cases, *catalogue.extreme_cases()]:
        if case.needs_gpu:
            continue
        for record in records_of(case):
            assert record["faults"] == [], (case.name, case.dtype, record["form"])


def test_the_cases_are_of_every_recurrence_that_the_op_serves() -> None:
    every = [case for dtype in DTYPES for case in catalogue.feature_cases(dtype)]
    every += [*catalogue.extreme_cases(), *catalogue.long_cases()]
    assert len({(case.dtype, case.name) for case in every}) == len(every)
    product = {(gates, erases) for gates in ("none", "scalar", "channel") for erases in (0, 1)}
    for kind in (
        [case for case in every if case.documents],
        [case for case in every if case.is_continued],
        [case for case in every if case.forms == ("step",)],
        [case for case in every if case.forms == ("summary",)],
    ):
        assert {(case.gates, case.erases) for case in kind} == product
    assert max(case.T for case in every) > 2**17


def test_flash_linear_attention_is_asked_for_what_it_can_do() -> None:
    cases = catalogue.peer_cases()
    assert {case.backend(CPU) for case in cases} == {"fla"}
    assert all(case.needs_gpu for case in cases)
    for case in cases:
        # The checks themselves are sound: our own backend passes them.
        for record in check(case.shrunk(24, 8), CPU, "torch"):
            assert record["faults"] == []


@pytest.mark.parametrize("name", ["out", "final state", "dbeta", "dlog_g", "dstate"])
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = DeltaCase(name="packed", T=40, K=8, V=8, documents=(0, 9), is_continued=True)
    run = DeltaCase.run

    def harmed(self: DeltaCase, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
        results = run(self, inputs, dtype, **how)
        if how["backend"] == "torch":
            results[name] = results[name] * 1.2
        return results

    monkeypatch.setattr(DeltaCase, "run", harmed)
    (record,) = records_of(case)
    assert [fault.partition(":")[0] for fault in record["faults"]] == [name]


def in_place_of_fla(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **_: Any) -> Any:
    return op.delta_rule(q, k, v, rest[0], rest[1], backend="torch")


def test_every_kind_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in tasks.op_tasks():
        if task.implementation == "triton":  # its interpreter cannot compute in bfloat16
            continue
        result = replace(task, T=40, H=1, K=16).measure(CPU)
        assert result["forward_backward_ms"] > 0
        assert task.is_ours
    peers = tasks.peer_tasks()
    # In place of the package: what differs in nothing.
    monkeypatch.setattr(op, "delta_rule_fla", in_place_of_fla)
    assert replace(peers[0], T=40, H=1, K=16).measure(CPU)["differs_by"] == 0
    monkeypatch.undo()
    assert {task.package for task in peers} == {"fla"}
    assert not any(task.is_ours for task in peers)
    assert {(task.kind, task.T) for task in peers} == {
        (task.kind, task.T) for task in tasks.op_tasks() if task.implementation == "torch"
    }
    with pytest.raises(ValueError, match="backend: 'fla' cannot run"):
        replace(peers[0], T=40).measure(CPU)
