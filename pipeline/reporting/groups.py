"""Results of one task that belong into one figure or table, from all runs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from longhaul.pipeline.reporting.drawing import Row
from longhaul.pipeline.reporting.runs import Evaluated, Run
from longhaul.pipeline.reporting.variants import NamedRuns

SETTING = ("run", "variant", "step", "positions")
"""The first columns of tables of results."""

_BOS = "beginning-of-sequence id in front"
_PROTOCOLS = {
    "perplexity": {
        "stride": "stride in tokens",
        "document_tokens": "first tokens read of each document",
        "bos": _BOS,
    },
    "passkey": {"depths": "depths of keys", "bos": _BOS},
    "scores": {"bos": _BOS},
}
"""The columns of options in the tables of tasks, and what captions call them."""


class EvaluatedRun(NamedTuple):
    """A run, and its results of one task."""

    run: Run
    evaluated: Evaluated

    @property
    def scaling(self) -> str:
        return self.evaluated.label.scaling


class Group(NamedTuple):
    """Results of one task on one text, from all runs with one training context."""

    context: int
    text: str
    members: list[EvaluatedRun]

    def name(self, task: str) -> str:
        return f"{task}_{self.context:06d}" + (f"_{self.text}" if self.text else "")

    @property
    def where(self) -> str:
        return f"trained at {self.context:,}" + (f", on {self.text}" if self.text else "")

    @property
    def checkpoints(self) -> str:
        steps = sorted({one.evaluated.label.step for one in self.members})
        numbers = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        return f"Checkpoints of step {numbers}."


def groups(named: NamedRuns, task: str) -> Iterator[Group]:
    """The results of a task by training context and text; members in the order of the runs."""
    found: dict[tuple[int, str], list[EvaluatedRun]] = defaultdict(list)
    for run in named.runs:
        for evaluated in run.evaluations[task]:
            if evaluated.rows:
                found[run.context, evaluated.label.text].append(EvaluatedRun(run, evaluated))
    for (context, text), members in sorted(found.items()):
        yield Group(context, text, members)


def setting(named: NamedRuns, one: EvaluatedRun) -> Row:
    """The values of SETTING."""
    step = one.evaluated.label.step
    return [one.run.name, named.label(one.run), step, one.scaling or "as trained"]


def column_values(group: Group, column: str) -> str:
    """All values of a column of whole numbers or words, as text: numbers first."""
    values = {row[column] for one in group.members for row in one.evaluated.rows}
    numbers = sorted(value for value in values if isinstance(value, int))
    words = sorted(value for value in values if isinstance(value, str))
    return ", ".join([*(f"{number:,}" for number in numbers), *words])


def protocol(group: Group, task: str) -> str:
    """The options that decide what the task's results are of, and are not in their label."""
    return "; ".join(
        f"{name}: {column_values(group, column)}" for column, name in _PROTOCOLS[task].items()
    )


def passkeys(one: EvaluatedRun) -> dict[int, tuple[int, int]]:
    """The numbers of right answers and of prompts at each length, over all depths."""
    counts: dict[int, tuple[int, int]] = {}
    for row in one.evaluated.rows:
        right, count = counts.get(row["length"], (0, 0))
        counts[row["length"]] = right + row["right"], count + row["prompts"]
    return dict(sorted(counts.items()))
