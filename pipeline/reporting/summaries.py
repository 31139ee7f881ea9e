"""Tables of the results that `longhaul evaluate` logged."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from longhaul.pipeline.reporting.drawing import Row, Table
from longhaul.pipeline.reporting.groups import (
    SETTING,
    EvaluatedRun,
    groups,
    passkeys,
    protocol,
    setting,
)
from longhaul.pipeline.reporting.variants import NamedRuns


def attention_tables(named: NamedRuns) -> Iterator[Table]:
    """Statistics of mixing matrices, over all heads of all layers."""
    for group in groups(named, "attention"):
        rows = list[Row]()
        windows = [row["windows"] for one in group.members for row in one.evaluated.rows]
        fewest, most = min(windows), max(windows)
        read = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        for one in group.members:
            heads = one.evaluated.rows
            lives = [row["half_life"] for row in heads if math.isfinite(row["half_life"])]
            longest = [row for row in heads if lives and row["half_life"] == max(lives)]
            rates = [row["rotation"] for row in heads if math.isfinite(row["rotation"])]
            rows.append(
                [
                    *setting(named, one),
                    max(row["largest"] for row in heads),
                    *_mean_and_error(heads, "first_token_share"),
                    *_mean_and_error(heads, "kurtosis"),
                    median(lives) if lives else math.nan,
                    *_mean_and_error(longest[:1], "half_life"),
                    fmean(rates) if rates else math.nan,
                ]
            )
        yield Table(
            name=group.name("attention"),
            title=f"Mixing matrices, {group.where}",
            caption="Of absolute weights in the last half of each window, of which there were "
            f"{read}: the largest of all, and means; half-lives are of heads that forget. Errors "
            "are standard errors over windows; for a mean over heads the mean of the heads' "
            "errors, an upper bound",
            columns=[
                *SETTING,
                "largest weight",
                "share on the first token",
                "error of share",
                "kurtosis",
                "error of kurtosis",
                "median half-life (tokens)",
                "longest half-life (tokens)",
                "error of longest",
                "rotation rate (fixed = 1)",
            ],
            rows=rows,
        )


def _mean_and_error(heads: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    """The mean over heads, and the mean of the heads' standard errors; NaN of no head."""
    columns = name, f"{name}_standard_error"
    mean, error = (fmean(row[column] for row in heads) if heads else math.nan for column in columns)
    return mean, error


def score_tables(named: NamedRuns) -> Iterator[Table]:
    """The outliers that section 4.5 of CoCA compares between models."""
    for group in groups(named, "scores"):
        largest = {}
        for one in group.members:
            rows = one.evaluated.rows
            last = max(row["layer"] for row in rows)
            parts = [
                [row["largest"] for row in rows if (row["layer"] < last) is low]
                for low in (True, False)
            ]
            largest[id(one)] = [max(part, default=math.nan) for part in parts]
        most = {key: max(filter(math.isfinite, parts)) for key, parts in largest.items()}
        least = min(most.values())
        yield Table(
            name=group.name("scores"),
            title=f"Largest attention scores before the softmax, {group.where}",
            caption="Absolute scores of all tokens for all before them, in all heads; the last "
            "column is the largest over that of the run where it is least; "
            f"{protocol(group, 'scores')}",
            columns=[
                *SETTING,
                "tokens",
                "low layers",
                "last layer",
                "outliers (ratio to the least)",
            ],
            rows=[
                [
                    *setting(named, one),
                    max(row["key"] for row in one.evaluated.rows),
                    *largest[id(one)],
                    most[id(one)] / least if least else math.nan,
                ]
                for one in group.members
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
                caption=f"Columns are lengths of the {what} in tokens; {protocol(group, task)}",
                columns=[*SETTING, *map(str, lengths)],
                rows=[
                    [
                        *setting(named, one),
                        *(values.get(length, "") for length in lengths),
                    ]
                    for one, values in values_of
                ],
            )


def _perplexities(one: EvaluatedRun) -> dict[int, float]:
    return {row["window"]: row["perplexity"] for row in one.evaluated.rows}


def _percentages(one: EvaluatedRun) -> dict[int, float]:
    return {length: 100 * right / count for length, (right, count) in passkeys(one).items()}
