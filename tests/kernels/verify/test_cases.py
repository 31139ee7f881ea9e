"""The checks of the kernels, run on a CPU at small sizes: they find what is wrong, no more."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longhaul.kernels.common.triton import launch
from longhaul.kernels.power.triton import tile_sizes
from longhaul.kernels.power.verify import cases as power_cases
from longhaul.kernels.power.verify import catalogue
from longhaul.kernels.power.verify.cases import PowerCase
from longhaul.kernels.testing import compare
from longhaul.kernels.verify import candidates, cases
from longhaul.kernels.verify.cases import DTYPES

CPU = torch.device("cpu")


def every_case() -> list[PowerCase]:
    return [
        *catalogue.headline_cases(),
        *(case for dtype in DTYPES for case in catalogue.feature_cases(dtype)),
        *catalogue.extreme_cases("triton"),
        *catalogue.long_cases(),
        *catalogue.candidate_cases(),
    ]


def records_of(given: list[PowerCase]) -> list[dict[str, Any]]:
    """What checks of the torch backend found, none of which is a fault."""
    found = []
    for case in given:
        for record in cases.check(case.shrunk(40, 8), CPU, "torch"):
            assert record["faults"] == [], (record["name"], record["form"])
            for tensor in record["tensors"].values():
                assert tensor["error"] <= tensor["allowed"] <= 0.05
            found.append(record)
    return found


def test_a_check_compares_outputs_states_and_every_gradient() -> None:
    by_name = {case.name: case for case in catalogue.feature_cases("float32")}
    grads = {"dq", "dk", "dv", "dlog_g", "dkv", "dnorm"}
    after = {"final kv", "final norm"}
    for name, wanted in (
        ("packed", {"out"} | after | grads),
        ("steps, degree 2, K 64", {"out"} | after),
        ("state alone", after | grads - {"dq"}),
    ):
        for record in records_of([by_name[name]]):
            assert set(record["tensors"]) == wanted


@pytest.mark.wide
def test_every_check_passes_on_the_torch_backend() -> None:
    features = [case for dtype in DTYPES for case in catalogue.feature_cases(dtype)]
    records = records_of(
        [*catalogue.headline_cases(), *features, *catalogue.extreme_cases("torch")]
    )
    assert {one["form"] for one in records} == {"chunked", "attention", "step", "state"}


def test_the_cases_are_what_the_promise_names() -> None:
    every = every_case()
    assert len({(case.dtype, case.name) for case in every}) == len(every)
    assert {case.degree for case in every} == {1, 2, 4, 6, 8}
    assert {case.dtype for case in every} == {"bfloat16", "float16", "float32"}
    assert any(case.documents for case in every)
    assert any(case.H > case.G for case in every)
    assert max(case.T for case in every) > 2**20
    assert {case.candidate for case in every} == {None, *range(candidates.MOST_CANDIDATES)}


def test_no_kernel_has_more_candidates_than_are_checked() -> None:
    found = [
        len(choice.configs)
        for table in vars(tile_sizes).values()
        if isinstance(table, tile_sizes.ChunkedCandidates)
        for choice in table
    ]
    found += [
        len(blocks.candidates.configs)
        for table in vars(tile_sizes).values()
        if isinstance(table, tile_sizes.AttentionBlocks)
        for width in table[:3]
        for blocks in width
    ]
    assert max(found) == candidates.MOST_CANDIDATES


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dlog_g", "dkv", "dnorm", "final kv"])
@pytest.mark.parametrize("harm", ["a wrong value", "a NaN", "noise"])
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, name: str, harm: str) -> None:
    case = PowerCase(name="packed", T=40, K=8, V=8, documents=(0, 9), is_continued=True)
    run = PowerCase.run

    def harmed(self: PowerCase, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
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

    monkeypatch.setattr(PowerCase, "run", harmed)
    (record,) = cases.check(replace(case, forms=("chunked",)), CPU, "torch")
    assert any(fault.startswith(f"{name}: ") for fault in record["faults"])


@pytest.mark.usefixtures("unchecked")
def test_a_candidate_runs_by_its_number_and_may_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forced: list[int | None] = []

    def run(self: PowerCase, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
        forced.append(launch._forced)
        if launch._forced == 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return {"out": torch.ones(3, dtype=dtype)}

    monkeypatch.setattr(PowerCase, "run", run)
    case = PowerCase(name="plain", T=20, K=8, V=8, forms=("chunked",), dtype="float32")
    for candidate, wanted in ((None, None), (1, 1)):
        (record,) = cases.check(replace(case, candidate=candidate), CPU, "torch")
        assert record["faults"] == []
        assert forced == [None, None, wanted, wanted], "the oracle and the definition, then twice"
        forced.clear()
    (record,) = cases.check(replace(case, candidate=2), CPU, "torch")
    assert record["faults"] == []
    assert "shared memory" in record["does_not_fit"]


@pytest.mark.usefixtures("unchecked")
def test_a_call_that_raises_is_recorded() -> None:
    case = PowerCase(name="plain", T=20, K=8, V=8, forms=("chunked", "unknown"))
    good, bad = cases.check(case, CPU, "torch")
    assert good["faults"] == []
    assert bad["faults"][0].startswith("ValueError: form: found 'unknown'")


def test_a_write_to_an_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PowerCase.run

    def writing(self: PowerCase, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
        results = run(self, inputs, dtype, **how)
        if how["backend"] == "torch":
            inputs["v"] += 1
        return results

    monkeypatch.setattr(PowerCase, "run", writing)
    case = PowerCase(name="plain", T=20, K=8, V=8, forms=("chunked",))
    (record,) = cases.check(case, CPU, "torch")
    assert "v: an input was written to" in record["faults"]
    assert "out: differs when run again" in record["faults"]


def test_with_wide_strides_tokens_pass_two_to_the_31_elements() -> None:
    x = torch.empty(1, 131_073, 2, 64, dtype=torch.bfloat16, device="meta")
    assert power_cases._with_wide_strides(x).stride(1) * 131_072 > 2**31


def test_long_sequences_are_not_compared_with_the_quadratic_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_case: PowerCase, _inputs: dict[str, Tensor], _dtype: torch.dtype, **how: Any) -> Any:
        return {how["backend"]: torch.empty(0)}

    monkeypatch.setattr(PowerCase, "run", run)
    for case in every_case():
        is_large = case.T > 2048 or (case.degree > 2 and case.K == 64)
        backend = "torch" if is_large or case.forms == ("state",) else "reference"
        assert list(case.expected({}, torch.float64)) == [backend]


def test_comparison_never_passes_an_oracle_that_is_not_a_number() -> None:
    x = torch.ones(3)
    assert compare(x, torch.tensor([1.0, torch.nan, 1.0]).double(), x, multiple=2.0).fault
