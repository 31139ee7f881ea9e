"""Losses at equal sequences, and gaps to softmax, of runs made by hand."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import stdev
from typing import Any

import pytest
from made_runs import run, seeds_of, windows, with_rows
from matplotlib.figure import Figure as FigureOfMatplotlib
from scipy import stats

from longhaul.pipeline.evaluation.labels import Label
from longhaul.pipeline.reporting import drawing, evaluations
from longhaul.pipeline.reporting.caveats import caveats, unmeasured
from longhaul.pipeline.reporting.comparison import (
    at_sequences,
    at_the_end,
    gap_against_context,
    gap_at_sequences,
    loss_against_context,
    loss_at_sequences,
    paired_gaps,
    seeds_table,
    training_loss,
)
from longhaul.pipeline.reporting.drawing import Figure
from longhaul.pipeline.reporting.runs import Data, Point, metric_rows
from longhaul.pipeline.reporting.tables import TABLES, Evaluated
from longhaul.pipeline.reporting.training import (
    loss_against_state,
    loss_against_tokens,
    loss_of_sources,
)
from longhaul.pipeline.reporting.variants import NamedRuns
from longhaul.pipeline.reporting.verdicts import verdict_tables


def test_each_source_has_a_line_in_a_colour_of_its_own() -> None:
    points = {
        name: [Point(step, step * 512, 5.0 - step / 10 + at) for step in range(1, 5)]
        for at, name in enumerate(("web", "code"))
    }
    plain = run("softmax", [4.0, 3.0])
    one = dataclasses.replace(
        plain, source_losses=points, source_validation={"web": points["web"], "code": []}
    )
    training, validation = loss_of_sources(NamedRuns([one]))
    assert training.name == "training_loss_of_sources_000064"
    assert [series.label for series in training.series] == ["web", "code"]
    assert training.series[0].y == pytest.approx([4.9, 4.8, 4.7, 4.6])
    assert len({series.look.colour for series in training.series}) == 2
    assert len(training.rows) == 8
    assert [series.label for series in validation.series] == ["web"]
    # Two variants have lines of their own, in the source's colour.
    other = dataclasses.replace(run("sympow", [4.0, 3.0]), source_losses=points)
    training, _ = loss_of_sources(NamedRuns([one, other]))
    looks = {(one.label.partition(": ")[0], one.look.colour) for one in training.series}
    assert len({series.label for series in training.series}) == 4
    assert len(looks) == 2
    assert list(loss_of_sources(NamedRuns([plain]))) == []


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
    assert {series.label for series in figure.series} == {"linear"}  # of softmax is the line alone
    assert "Seeds: linear 3." in figure.caption


def test_lines_have_bands_of_intervals_over_seeds() -> None:
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
    assert (points.is_seed, line.is_seed) == (True, False)
    half = 12.706204736 * 0.25  # Student's t of two seeds
    assert line.band is not None
    assert line.band[0] == pytest.approx([1.25 - half] * 2)
    assert line.band[1] == pytest.approx([1.25 + half] * 2)


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
    assert list(line.y) == [6.0, 6.0]
    assert line.band is not None
    assert line.band[1] == pytest.approx([6 + 12.706204736 * 2] * 2)


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
    figure = next(drawn_of("scores")(named))
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


def test_runs_of_other_data_or_tokenizers_are_never_in_one_figure() -> None:
    ours = [run("softmax", [3.0, 2.0]), run("linear", [3.0, 2.5])]
    other = dataclasses.replace(
        run("sympow", [9.0, 8.0]), data=Data("b/train", "8" * 64), tokenizer="gpt2"
    )
    elsewhere = dataclasses.replace(run("sympow", [9.0, 8.0], seed=5), validation_data="another")
    parts = NamedRuns([*ours, other, elsewhere]).comparable()
    assert sorted(len(part.runs) for part in parts) == [1, 1, 2]
    figures = [figure for part in parts for figure in loss_against_context(part)]
    assert len({figure.name for figure in figures}) == 3
    for figure in figures:
        assert len({row[0] for row in figure.rows}) == len(figure.rows) <= 2
        assert any(
            "Runs of other training or validation data, or tokenizers," in one
            for one in figure.caveats
        )
    assert any("tokenizer gpt2" in figure.title for figure in figures)
    assert len(NamedRuns(ours).comparable()) == 1


def test_runs_of_other_budgets_are_never_in_one_figure() -> None:
    runs = [run("softmax", [3.0, 2.0]), run("linear", [3.0, 2.5]), run("sympow", [4.0] * 8)]
    named = NamedRuns(runs)
    short, long = loss_against_context(named)
    assert [len(figure.rows) for figure in (short, long)] == [2, 1]
    assert short.title.endswith(", after 1,024 tokens")
    assert len(list(loss_against_state(named))) == 2
    # The longer run's loss is at its own end, which the short ones have not read.
    assert [(one.title, [row[-2:] for row in one.rows]) for one in loss_at_sequences(named)] == [
        ("Training loss after 16 sequences, after 1,024 tokens", [[16, 2.5], [16, 2.0]]),
        ("Training loss after 64 sequences, after 4,096 tokens", [[64, 4.0]]),
    ]
    (gap,) = gap_at_sequences(named)
    assert (gap.name, len(gap.rows)) == ("gap_at_sequences_after000000001024", 2)
    assert "Runs of more or fewer tokens have figures of their own." in gap.caveats
    assert [len(table.rows) for table in seeds_table(named)] == [2, 1]
    begun = run("sympow", [4.0] * 4, "trainer.max_tokens=4096", status="RUNNING")
    _, unfinished = loss_at_sequences(NamedRuns([*runs[:2], begun]))
    assert [row[-2:] for row in unfinished.rows] == [[32, 4.0]]
    # A longer context may have more tokens where gaps are drawn: each is at equal tokens.
    runs = [
        run(kind, [3.0] * (context // 64), context=context)
        for kind in ("softmax", "linear")
        for context in (64, 128)
    ]
    (gap,) = gap_against_context(NamedRuns(runs))
    assert [row[4] for row in gap.rows] == [64, 128, 64, 128]
    assert len(list(loss_at_sequences(NamedRuns(runs)))) == 1


def test_a_figure_says_what_it_cannot_show() -> None:
    bigram = metric_rows({"loss_nats": 2.87})
    early, late = (f"optim.schedule.warmup_tokens={n}" for n in (512, 1024))
    runs = [*seeds_of("softmax", [3.43, 3.4], early), run("linear", [9.0, 2.5], late)]
    runs = [with_rows(one, bigram=bigram) for one in runs]
    (figure,) = loss_against_context(NamedRuns(runs))
    shown = " ".join(figure.caveats)
    assert "not better than a bigram model (2.87 nats per token): softmax (3.42)." in shown
    assert "within the warm-up of the learning rate: linear." in shown
    assert "one seed of linear" in shown
    assert "Seeds: linear 1, softmax 2." in figure.caption
    assert unmeasured(NamedRuns(runs)) == []
    elsewhere = dataclasses.replace(run("softmax", [3.0]), data=Data("b/train", "2" * 64))
    for others, where in (([run("softmax", [3.0])], ""), ([*runs, elsewhere], ", on b/train 2")):
        (sentence,) = unmeasured(NamedRuns(others))
        assert sentence.startswith(f"Not measured: whether these models{where}")
        assert "longhaul evaluate RUN --tasks bigram measures it" in sentence
    (table,) = seeds_table(NamedRuns(runs))
    assert any("not better than a bigram model" in one for one in table.caveats)
    good = [with_rows(one, bigram=bigram) for one in seeds_of("softmax", [2.0, 2.1], early)]
    (figure,) = loss_against_context(NamedRuns(good))
    assert list(figure.caveats) == []
    running = run("linear", [9.0], "trainer.max_tokens=1024", early, status="RUNNING")
    (figure,) = loss_against_context(NamedRuns([*good, running]))
    assert len(figure.rows) == 3
    beside = "Unequal tokens: 1 run that did not finish stand beside finished ones, with hollow"
    assert [one.startswith(beside) for one in figure.caveats] == [True]
    alone = caveats(NamedRuns([*good, running]), [running])
    assert alone == ["Unequal tokens: none of these runs has finished."]


def drawn_of(table: str) -> Callable[[NamedRuns], Iterator[Figure]]:
    """Makes the figures of a task's table."""
    return partial(evaluations.charts, TABLES[table])


def by_position(*losses: float) -> dict[str, list[dict[str, Any]]]:
    """Results of a window of so many positions."""
    errors = {"standard_error": 0.25, "standard_error_up_to_here": 0.25}
    numbered = list(enumerate(losses, start=1))
    return {
        "loss_in_bins": [{"first": t, "last": t, "loss_nats": y, **errors} for t, y in numbered],
        "positions": [
            {"position": t, "loss_nats": y, "mean_up_to_here": y, **errors} for t, y in numbered
        ],
    }


def test_a_loss_has_a_bigram_models_line_and_is_compared_at_its_worst_length() -> None:
    common = {"stride": 16, "tokens": 99, "document_tokens": "all", "bos": "yes"}
    common |= {"standard_error": math.nan}
    measured: dict[str, list[dict[str, Any]]] = {
        "context": windows(2.5, 2.82),
        "perplexity": [{"window": 64, "perplexity": math.exp(2.82), **common}],
        **by_position(2.5, 2.82),
    }
    trained = run("softmax", [9.0, 2.82])
    # It has been measured of a run of another context.
    other = with_rows(run("softmax", [9.0, 2.5], context=128), bigram=metric_rows({"": 2.757}))
    named = NamedRuns([with_rows(trained, **measured), other])
    drawn = [
        figure
        for make in (
            *(loss_at_sequences, loss_against_context, loss_against_state, loss_against_tokens),
            *(drawn_of("loss_in_bins"), drawn_of("positions")),
            *(drawn_of("context"), drawn_of("perplexity")),
        )
        for figure in make(named)
    ]
    worse = "not better than a bigram model (2.76 nats per token): softmax"
    for figure in drawn:
        height = math.exp(2.757) if figure.name.startswith("perplexity") else 2.757
        assert figure.reference == ("bigram model", pytest.approx(height)), figure.name
        is_good = figure.name.endswith("_000128")
        assert any(worse in one for one in figure.caveats) is not is_good, figure.name
        assert figure.y_range is None or figure.y_range[0] < height < figure.y_range[1]
    assert len(drawn) == 10
    # Where its own context has been measured, that line is drawn.
    both = NamedRuns([with_rows(trained, **measured, bigram=metric_rows({"": 2.6})), other])
    ((_, height), (_, other_height)) = (
        figure.reference or ("", math.nan) for figure in loss_against_tokens(both)
    )
    assert (height, other_height) == (2.6, 2.757)
    # The first positions are hard for any model, and a bigram model of them is no worse.
    early = with_rows(trained, bigram=metric_rows({"": 2.757}), **by_position(9.0, 2.5))
    for make in (drawn_of("loss_in_bins"), drawn_of("positions")):
        (figure,) = make(NamedRuns([early]))
        assert not any("bigram" in one for one in figure.caveats)


def test_lengths_beyond_the_training_context_are_called_extrapolation() -> None:
    def found(*losses: float) -> list[bool]:
        bigram = metric_rows({"": 3.0})
        runs = [
            with_rows(one, context=windows(*losses), bigram=bigram)
            for kind in ("softmax", "linear")
            for one in seeds_of(kind, [2.0, 2.0])
        ]
        named = NamedRuns(runs)
        (table,) = verdict_tables(named)
        sentence = "Lengths beyond the training context of 64 tokens measure extrapolation: "
        every = (*drawn_of("context")(named), table)
        assert len(every) == 3
        # A verdict is of the longest windows, in which these are worse than a bigram model.
        is_worse = any("not better than a bigram model" in one for one in table.caveats)
        assert is_worse is (losses[-1] > 3)
        return [any(one.startswith(sentence) for one in made.caveats) for made in every]

    assert found(2.0) == [False] * 3
    assert found(2.0, 3.5) == [True] * 3


def test_evaluations_are_means_over_seeds_with_paired_gaps() -> None:
    runs = [
        with_rows(one, context=windows(level + gap, level + 2 * gap))
        for kind, gap in (("softmax", 0.0), ("linear", 0.25))
        for one, level in zip(seeds_of(kind, [2.0, 2.0, 2.0]), (2.0, 3.0, 4.0), strict=True)
    ]
    figure, gap = drawn_of("context")(NamedRuns(runs))
    means = [series for series in figure.series if not series.is_seed]
    assert [list(series.y) for series in means] == [[3.25, 3.5], [3.0, 3.0]]
    wanted = stats.t.interval(0.95, 2, loc=3.25, scale=1 / math.sqrt(3))
    assert means[0].band is not None
    assert means[0].windows is not None
    assert [bound[0] for bound in means[0].band] == pytest.approx(wanted)
    assert [bound[0] for bound in means[0].windows] == [3.0, 3.5]
    assert len(figure.series) == 2 * 3 + 2
    # Seeds differ by 1, and differences within a seed by nothing.
    (line,) = (series for series in gap.series if not series.is_seed)
    assert (list(line.x), list(line.y)) == ([64, 128], [0.25, 0.5])
    assert line.band == ([0.25, 0.5], [0.25, 0.5])
    assert gap.reference == ("softmax", 0.0)
    assert gap.name == "gap_loss_in_windows_000064"
    assert len(gap.rows) == 6
    # Another reference turns the gap around.
    _, turned = drawn_of("context")(NamedRuns(runs, reference="linear"))
    (line,) = (series for series in turned.series if not series.is_seed)
    assert list(line.y) == [-0.25, -0.5]
    with pytest.raises(ValueError, match="--against: found 'x', wanted linear or softmax"):
        NamedRuns(runs, reference="x")


def test_perplexities_are_averaged_and_compared_as_losses() -> None:
    def rows(value: float) -> list[dict[str, Any]]:
        common = {"stride": 16, "tokens": 99, "document_tokens": "all", "bos": "yes"}
        return [{"window": 64, "perplexity": value, "standard_error": math.nan, **common}]

    runs = [
        with_rows(one, perplexity=rows(value))
        for kind, values in (("softmax", (2.0, 8.0)), ("linear", (4.0, 16.0)))
        for one, value in zip(seeds_of(kind, [2.0, 2.0]), values, strict=True)
    ]
    figure, gap = drawn_of("perplexity")(NamedRuns(runs))
    assert [list(s.y) for s in figure.series if not s.is_seed] == [
        pytest.approx([8.0]),
        pytest.approx([4.0]),
    ]
    assert [row[-1] for row in gap.rows] == pytest.approx([math.log(2)] * 2)


def test_checkpoints_of_other_tokens_are_never_in_one_figure() -> None:
    done = with_rows(run("softmax", [3.0, 2.0]), context=windows(2.0))
    begun = with_rows(run("linear", [3.0] * 2, status="RUNNING"), context=windows(3.0))
    early = {"context": [Evaluated(Label(1, None, "", ""), windows(3.0))]}
    begun = dataclasses.replace(begun, evaluations=begun.evaluations | early)
    figures = list(drawn_of("context")(NamedRuns([done, begun])))
    assert [len(figure.rows) for figure in figures] == [1, 1]
    assert len({figure.name for figure in figures}) == 2


def test_bits_per_byte_are_of_the_bytes_that_were_counted() -> None:
    loss = 3 * math.log(2)
    one = dataclasses.replace(run("softmax", [loss]), bytes_per_token=4.0)
    assert one.bits_per_byte == pytest.approx(0.75)
    (figure,) = loss_against_context(NamedRuns([one]))
    assert figure.bytes_per_token == 4.0
    unknown = dataclasses.replace(one, bytes_per_token=math.nan)
    (figure,) = loss_against_context(NamedRuns([unknown]))
    assert math.isnan(figure.bytes_per_token)
