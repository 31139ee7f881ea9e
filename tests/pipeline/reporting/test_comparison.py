"""Losses at equal sequences, and gaps to softmax, of runs made by hand."""

import dataclasses
import math
from collections.abc import Sequence
from statistics import stdev

import pytest
from logged_runs import small_config
from matplotlib.figure import Figure as FigureOfMatplotlib

from longhaul.pipeline.evaluation.labels import Label
from longhaul.pipeline.reporting import drawing, evaluations
from longhaul.pipeline.reporting.comparison import (
    at_sequences,
    at_the_end,
    gap_at_sequences,
    paired_gaps,
    loss_at_sequences,
    seeds_table,
    training_loss,
)
from longhaul.pipeline.reporting.runs import Data, Evaluated, Point, Run
from longhaul.pipeline.reporting.variants import NamedRuns

UPDATE = 512


def run(
    kind: str,
    losses: Sequence[float],
    *overrides: str,
    context: int = 64,
    seed: int = 0,
    status: str = "FINISHED",
) -> Run:
    """A run of updates of 512 tokens, whose last validation loss is its last training loss."""
    given = (f"model.attention.kind={kind}", f"data.context={context}", f"trainer.seed={seed}")
    config = small_config(*given, *overrides)
    points = [Point(step, step * UPDATE, loss) for step, loss in enumerate(losses, start=1)]
    name = " ".join([kind, str(context), str(seed), *overrides])
    return Run(
        run_id=name,
        name=name,
        status=status,
        commit="abc",
        hardware="a processor",
        data=Data("gpt2/train", "9" * 64),
        tokenizer="bytes",
        validation_data="8",
        bytes_per_token=1.0,
        config=config,
        config_text="",
        losses=points,
        validation=points[-1:],
        speed=1.0,
        num_parameters=1,
        state_bytes=1,
        evaluations={},
        left_out=[],
    )


def test_a_longer_context_has_read_more_tokens_at_as_many_sequences() -> None:
    falling = [10.0 - step for step in range(8)]
    short, long = run("softmax", falling), run("softmax", falling, context=256)
    named = NamedRuns([short, long])
    # 8 updates are 64 sequences of 64 tokens, but 16 of 256.
    assert named.sequences == 16
    assert at_sequences(named).losses == {short.run_id: falling[1], long.run_id: falling[7]}
    (figure,) = loss_at_sequences(named)
    assert figure.title == "Training loss after 16 sequences"
    # Asked for more than one of them has read, it is left out.
    (figure,) = loss_at_sequences(NamedRuns([short, long], 40))
    assert [row[-2:] for row in figure.rows] == [[40, falling[4]]]
    assert "Left out: 1 runs, which have read less or diverged." in figure.caption
    wanted = "--sequences: found 65, wanted at most 64, which one run has read, or 16, which all"
    with pytest.raises(ValueError, match=wanted):
        NamedRuns([short, long], 65)


def test_a_diverged_run_has_no_loss_after_it_diverged() -> None:
    diverged = run("softmax", [5.0] * 3 + [math.nan] * 27)
    assert training_loss(diverged, 3 * 8) == 5.0
    assert math.isnan(training_loss(diverged, 30 * 8))


def test_the_last_tenth_of_the_sequences_is_averaged() -> None:
    losses = [9.0] * 27 + [3.0, math.nan, 4.0, 100.0]
    assert training_loss(run("softmax", losses), 30 * 8) == 3.5
    # Between two updates, the last one counts if the tenth has none.
    assert training_loss(run("softmax", [5.0, 4.0, 3.0]), 23) == 4.0
    assert math.isnan(training_loss(run("softmax", [5.0]), 9))
    assert math.isnan(training_loss(run("softmax", [math.nan]), 8))


def test_an_unfinished_run_does_not_shorten_the_others() -> None:
    done, begun = run("softmax", [4.0] * 8), run("linear", [5.0], status="RUNNING")
    named = NamedRuns([done, begun])
    assert named.sequences == 64
    assert set(at_sequences(named).losses) == {done.run_id}


def test_gaps_are_paired_by_seed_context_and_data() -> None:
    levels = (3.0, 4.0, 5.0)  # the order of the data moves all kinds alike
    gaps = (0.25, 0.5, 0.25)
    runs = [run("softmax", [level], seed=seed) for seed, level in enumerate(levels)]
    runs += [
        run("linear", [level + gap], seed=seed)
        for seed, (level, gap) in enumerate(zip(levels, gaps, strict=True))
    ]
    runs += [run("linear", [2.0], seed=7), run("linear", [2.0], context=128)]
    named = NamedRuns(runs, 8)
    measure = at_sequences(named)
    found = paired_gaps(named, measure)
    assert [found.get(run.run_id) for run in runs] == [0.0, 0.0, 0.0, *gaps, None, None]
    (table,) = seeds_table(named)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    (linear,) = (r for r in rows if (r["variant"], r["training context"]) == ("linear", 64))
    assert linear["seeds"] == 4
    assert linear["gap in training loss"] == pytest.approx(1 / 3)
    error = stdev(gaps) / math.sqrt(3)
    assert linear["error of gap in training loss"] == pytest.approx(error)
    assert linear["error of training loss"] == pytest.approx(stdev([3.25, 4.5, 5.25, 2.0]) / 2)
    (figure,) = gap_at_sequences(named)
    assert figure.reference == ("softmax", 0.0)
    assert [series.label for series in figure.series] == ["linear"]  # of softmax is the line alone


def test_lines_have_bands_of_standard_errors_over_seeds() -> None:
    runs = [
        run(kind, [level + context / 64] * 4, context=context, seed=seed)
        for kind, levels in (("softmax", (3.0, 5.0)), ("linear", (4.0, 6.5)))
        for context in (64, 128)
        for seed, level in enumerate(levels)
    ]
    (figure,) = gap_at_sequences(NamedRuns(runs))
    points, line = figure.series
    assert list(points.y) == [1.0, 1.5, 1.0, 1.5]
    assert (list(line.x), list(line.y)) == ([64, 128], [1.25, 1.25])
    assert line.band == ([1.0, 1.0], [1.5, 1.5])


def test_a_seed_that_was_run_twice_counts_once() -> None:
    runs = [
        run("linear", [level] * 4, context=context, seed=seed)
        for context in (64, 128)
        for seed, level in ((0, 3.0), (0, 5.0), (1, 8.0))
    ]
    # `run` names runs of one seed alike.
    runs = [dataclasses.replace(one, run_id=str(index)) for index, one in enumerate(runs)]
    named = NamedRuns(runs)
    (table,) = seeds_table(named)
    for row in (dict(zip(table.columns, cells, strict=True)) for cells in table.rows):
        assert (row["seeds"], row["training loss"]) == (2, 6.0)
        assert row["error of training loss"] == pytest.approx(2.0)
    (figure,) = loss_at_sequences(named)
    points, line = figure.series
    assert len(points.x) == 6
    assert (list(line.y), line.band) == ([6.0, 6.0], ([4.0, 4.0], [8.0, 8.0]))


def test_degrees_of_a_kind_have_its_colour() -> None:
    degrees = [run("sympow", [3.0], f"model.attention.degree={p}") for p in (2, 4)]
    named = NamedRuns([*degrees, run("softmax", [3.0]), run("linear", [3.0])])
    two, four = map(named.look, degrees)
    assert len({named.look(one).colour for one in named.runs}) == 3
    assert two.colour == four.colour
    assert two.line != four.line


def test_scores_of_two_variants_of_a_kind_have_lines_of_their_own() -> None:
    rows = [
        {"layer": 1, "key": key, "score": 1.0, "least_of_heads": 0.0, "most_of_heads": 2.0}
        | {"largest": 2.0, "bos": "no"}
        for key in (1, 2)
    ]
    measured = {"scores": [Evaluated(Label(1, None, "", ""), rows)], "bigram": []}
    of_kinds = [run("coca", [3.0]), run("coca", [3.0], "model.biases=true"), run("linear", [3.0])]
    named = NamedRuns([dataclasses.replace(one, evaluations=measured) for one in of_kinds])
    figure = next(evaluations.scores(named))
    assert figure.y_label == "attention score before the softmax"
    axes = FigureOfMatplotlib().subplots()
    for series in figure.series[:2]:
        drawing._plot(axes, series)
    plain, with_biases = axes.lines
    assert plain.get_color() == with_biases.get_color()
    assert (plain.get_linestyle(), with_biases.get_linestyle()) == ("-", "--")


def test_the_best_softmax_of_a_context_is_the_baseline() -> None:
    fast, slow = "optim.learning_rate=0.01", "optim.learning_rate=0.001"
    runs = [
        run("softmax", [4.0] * 2, fast),
        run("softmax", [3.0] * 2, slow),
        run("softmax", [3.0] * 2, fast, context=128),
        run("softmax", [3.5] * 2, slow, context=128),
        run("linear", [5.0] * 2),
        run("linear", [5.0] * 2, context=128),
    ]
    named = NamedRuns(runs, 8)
    found = paired_gaps(named, at_sequences(named))
    assert [found[one.run_id] for one in runs] == [1.0, 0.0, 0.0, 0.5, 2.0, 2.0]


def test_validation_losses_are_compared_after_equal_tokens_only() -> None:
    runs = [run("softmax", [4.0] * 2), run("linear", [4.5] * 2), run("retention", [3.0] * 4)]
    named = NamedRuns(runs)
    assert set(paired_gaps(named, at_the_end(named))) == {"softmax 64 0", "linear 64 0"}
    assert set(paired_gaps(named, at_sequences(named))) == {one.run_id for one in runs}


def test_a_gap_is_not_between_runs_of_different_data() -> None:
    softmax, other = run("softmax", [5.0]), run("sympow", [6.0])
    named = NamedRuns([softmax, other])
    assert paired_gaps(named, at_sequences(named))[other.run_id] == 1.0
    elsewhere = dataclasses.replace(other, data=Data("other/train", "8" * 64))
    named = NamedRuns([softmax, elsewhere])
    assert other.run_id not in paired_gaps(named, at_sequences(named))
