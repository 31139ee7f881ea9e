"""Tables of the results that `longhaul evaluate` logged."""

from collections.abc import Iterator

from longhaul.pipeline.evaluation.tables import TaskTable, options_in_words
from longhaul.pipeline.evaluation.tasks.passkey import answers_by_length
from longhaul.pipeline.reporting.drawing import Table
from longhaul.pipeline.reporting.groups import SETTING, EvaluatedRun, groups, setting
from longhaul.pipeline.reporting.tables import TABLES
from longhaul.pipeline.reporting.variants import NamedRuns


def summaries(table: TaskTable, named: NamedRuns) -> Iterator[Table]:
    """The summary that a task's file describes, of all runs that have the table."""
    assert table.summary is not None
    for group in groups(named, table.name):
        cells = table.summary.rows(group.tables)
        yield Table(
            name=group.name(table.name),
            title=f"{table.summary.title}, {group.where}",
            caption=table.summary.caption(group.tables),
            columns=[*SETTING, *table.summary.columns],
            rows=[
                [*setting(named, one), *row] for one, row in zip(group.members, cells, strict=True)
            ],
        )


def bigram_tables(named: NamedRuns) -> Iterator[Table]:
    """The loss of a bigram model of the same training text beside each run's own."""
    for group in groups(named, "bigram"):
        yield Table(
            name=group.name("bigram"),
            title=f"Loss of a bigram model of the training text, {group.where}",
            caption="Nats per token; the run's own loss is that of its last validation",
            columns=[*SETTING, "bigram model", "run's loss"],
            rows=[
                [*setting(named, one), one.evaluated.rows[0]["value"], one.run.final_loss]
                for one in group.members
            ],
        )


def lm_eval_tables(named: NamedRuns) -> Iterator[Table]:
    """Results of EleutherAI's lm_eval, a row for each metric."""
    for group in groups(named, "lm-eval"):
        yield Table(
            name=group.name("lm_eval"),
            title=f"lm-eval, {group.where}",
            caption="Errors are lm_eval's standard errors",
            columns=[*SETTING, "metric", "value", "error"],
            rows=[
                [*setting(named, one), row["metric"], row["value"], row["standard_error"]]
                for one in group.members
                for row in one.evaluated.rows
            ],
        )


def ntk_tables(named: NamedRuns) -> Iterator[Table]:
    """Tables 4 and 5 of CoCA, if any run was read with scaled positions."""
    for task, what, title, read in (
        ("perplexity", "window", "Perplexity of a sliding window", _perplexities),
        ("passkey", "prompt", "Passkeys retrieved (%)", _percentages),
    ):
        for group in groups(named, task):
            if not any(one.scaling for one in group.members):
                continue
            values_of = [(one, read(one)) for one in group.members]
            lengths = sorted({length for _, values in values_of for length in values})
            yield Table(
                name=group.name(f"ntk_{task}"),
                title=f"{title}, {group.where}",
                caption=f"Columns are lengths of the {what} in tokens; "
                + options_in_words(group.tables, TABLES[task].options),
                columns=[*SETTING, *map(str, lengths)],
                rows=[
                    [*setting(named, one), *(values.get(length, "") for length in lengths)]
                    for one, values in values_of
                ],
            )


def _perplexities(one: EvaluatedRun) -> dict[int, float]:
    return {row["window"]: row["perplexity"] for row in one.evaluated.rows}


def _percentages(one: EvaluatedRun) -> dict[int, float]:
    return {
        length: 100 * right / count
        for length, (right, count) in answers_by_length(one.evaluated.rows).items()
    }
