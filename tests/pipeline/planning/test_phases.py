"""Plans of runs whose contexts or updates grow."""

import re

import pytest

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.cli import main
from longhaul.pipeline.planning.memory import MemorySettings, Planner
from longhaul.pipeline.planning.phases import phases

SMALL = (
    *("model.width=32", "model.heads=2", "model.layers=1", "data.context=128"),
    *("trainer.micro_batch=2", "optim.tokens_per_update=512", "trainer.max_tokens=6144"),
    *("trainer.strategy=fsdp", "trainer.devices=2"),
)
SHORT = "data.short_first=[{context: 16, until_tokens: 600}, {context: 64, until_tokens: 3000}]"
LARGER = "optim.larger_updates=[{at_tokens: 1500, factor: 2}, {at_tokens: 9000, factor: 5}]"
LATER = SHORT.replace("3000", "7000")


def config(*overrides: str) -> RunConfig:
    return load_run_config("run/demo.yaml", [*SMALL, *overrides])


@pytest.mark.parametrize("overrides", [(), (SHORT,), (LARGER,), (SHORT, LARGER), (LATER, LARGER)])
def test_phases_are_those_that_a_run_goes_through(overrides: tuple[str, ...]) -> None:
    run = config(*overrides)
    wanted, tokens = [], 0
    while tokens < run.trainer.max_tokens:
        context, factor = run.data.context_at(tokens), run.optim.update_factor(tokens)
        wanted.append((context, 2 * 128 // context, 512 * factor))
        tokens += 512 * factor
    found = [
        (one.data.context, one.trainer.micro_batch, one.optim.tokens_per_update)
        for one in phases(run)
    ]
    assert found == list(dict.fromkeys(wanted))
    assert {one.accumulation for one in phases(run)} == {size // 512 for *_, size in wanted}


def planned(*overrides: str) -> tuple[int, float]:
    plan = Planner(config(*overrides)).plan(MemorySettings(strategy="fsdp"))
    return plan.total, plan.sent


@pytest.mark.wide
def test_the_plan_of_larger_updates_is_that_of_the_largest() -> None:
    larger = planned("optim.tokens_per_update=1024")
    # A second micro-batch runs beside the gradients of the first, and gathers blocks again.
    assert all(one > base for one, base in zip(larger, planned(), strict=True))
    assert planned(LARGER) == larger


def test_the_plan_of_shorter_contexts_has_the_highest_peak() -> None:
    each = [
        planned(f"data.context={context}", f"trainer.micro_batch={256 // context}")
        for context in (16, 64, 128)
    ]
    assert len(set(each)) == 3
    assert planned(SHORT) == max(each)
    assert planned(SHORT, "trainer.max_tokens=512") == each[0]  # which no longer context follows


def test_the_table_has_a_row_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("model.attention={kind: softmax}", "optim.name=muon")

    def rows_and_share(*overrides: str) -> tuple[list[str], float]:
        assert main(["plan", "run/demo.yaml", *SMALL, *options, *overrides]) == 0
        out = capsys.readouterr().out
        share = re.search(r"an update, (\S+)% of what its", out)
        assert share
        return re.findall(r"^ *softmax +([\d,]+) ", out, re.MULTILINE), float(share[1])

    contexts, share = rows_and_share(SHORT)
    assert contexts == ["16", "64", "128"]
    assert share == rows_and_share("data.context=16", "trainer.micro_batch=16")[1]
    assert rows_and_share(SHORT, "--contexts", "7")[0] == ["7"]
