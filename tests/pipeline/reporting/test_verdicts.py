"""What is said of each pair of kinds."""

import dataclasses
from typing import Any

import pytest
from made_runs import run, seeds_of, windows, with_rows

from longhaul.pipeline.evaluation.labels import Label
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.tables import Evaluated
from longhaul.pipeline.reporting.variants import NamedRuns
from longhaul.pipeline.reporting.verdicts import verdict_tables


def test_a_pair_has_a_verdict() -> None:
    runs = [*seeds_of("softmax", [2.0, 3.0, 4.0]), *seeds_of("linear", [2.5, 3.52, 4.51])]
    runs += seeds_of("sympow", [2.001, 3.0, 3.999])
    (table,) = verdict_tables(NamedRuns(runs))
    found = {
        (row["variant"], row["compared with"]): row
        for row in (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
    }
    linear = found["linear", "softmax"]
    assert (linear["seeds"], linear["verdict"]) == (3, "shown by 3 seeds: higher")
    assert linear["difference (nats per token)"] == pytest.approx(0.51)
    sympow = found["sympow p=2", "softmax"]
    assert sympow["verdict"] == "tie: less than 0.01 apart"
    assert len(found) == 3
    (mixed,) = verdict_tables(NamedRuns([*runs, run("retention", [2.0, 3.0])]))
    assert len(mixed.rows) == 6
    for one in (table, mixed):
        assert "corrected by Holm for the 3 rows with two seeds or more" in one.caption
    (alone,) = verdict_tables(NamedRuns([run("softmax", [2.0]), run("linear", [3.0])]))
    assert alone.rows[0][3] == "one seed: wanted two or more"


def test_a_verdict_of_windows_is_of_the_longest_that_a_pair_shares() -> None:
    def pair(seed: int, longer: tuple[float, ...] = ()) -> list[Run]:
        softmax, linear = (run(kind, [9.0, 2.0], seed=seed) for kind in ("softmax", "linear"))
        softmax = with_rows(softmax, context=windows(2.0, 2.0, *longer))
        return [softmax, with_rows(linear, context=windows(2.5, 3.0))]

    def found(runs: list[Run]) -> list[tuple[Any, ...]]:
        (table,) = verdict_tables(NamedRuns(runs))
        rows = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
        columns = ("loss", "seeds", "difference (nats per token)")
        return [tuple(row[c] for c in columns) for row in rows if row["loss"] != "validation"]

    wanted = [("in windows of 128", 2, 1.0)]
    assert found([*pair(0), *pair(1)]) == wanted
    # Nor does one variant's longer evaluation take the verdict away, or all of one seed,
    assert found([*pair(0, longer=(2.0,)), *pair(1)]) == wanted
    both = [with_rows(one, context=windows(2.0, 3.0, 4.0)) for one in pair(2)]
    assert found([*both, *pair(0), *pair(1)])[0][:2] == ("in windows of 128", 3)
    # a run that has not finished, or one with scaled positions.
    running = dataclasses.replace(pair(2)[0], status="RUNNING")
    longest = windows(2.0, 2.0, 2.0, 2.0)
    assert found([*pair(0), *pair(1), with_rows(running, context=longest)]) == wanted
    one, *others = pair(0)
    scaled = Evaluated(Label(2, None, "", "linear-2"), longest)
    every = one.evaluations | {"context": [*one.evaluations["context"], scaled]}
    one = dataclasses.replace(one, evaluations=every)
    assert found([one, *others, *pair(1)]) == wanted
