"""Results of one task that belong into one figure or table, from all runs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from longhaul.pipeline.evaluation.tables import Rows
from longhaul.pipeline.reporting.drawing import Row
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.tables import TABLES, Evaluated
from longhaul.pipeline.reporting.variants import NamedRuns

SETTING = ("run", "variant", "step", "positions")
"""The first columns of tables of results."""

OPTIONS = tuple(dict.fromkeys(name for table in TABLES.values() for name in table.options))
"""The names of all columns of options in tables of tasks."""


class EvaluatedRun(NamedTuple):
    """A run, and its results of one task."""

    run: Run
    evaluated: Evaluated

    @property
    def scaling(self) -> str:
        return self.evaluated.label.scaling

    @property
    def tokens(self) -> int:
        """That the checkpoint was trained on."""
        return self.evaluated.label.step * self.run.config.optim.tokens_per_update


class Group(NamedTuple):
    """Results of one task on one text, by checkpoints of one training context and token count."""

    context: int
    text: str
    members: list[EvaluatedRun]
    suffix: str
    """Of the names of files, where other runs have files of their own."""

    elsewhere: str
    """What titles say of these runs then."""

    split_by: str
    """Sentences on why."""

    def name(self, task: str) -> str:
        text = f"_{self.text}" if self.text else ""
        return f"{task}_{self.context:06d}{text}{self.suffix}"

    @property
    def tables(self) -> list[Rows]:
        return [one.evaluated.rows for one in self.members]

    @property
    def where(self) -> str:
        text = f", on {self.text}" if self.text else ""
        return f"trained at {self.context:,}{text}{self.elsewhere}"

    @property
    def checkpoints(self) -> str:
        steps = sorted({one.evaluated.label.step for one in self.members})
        numbers = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        return f"Checkpoints of step {numbers}."


def groups(named: NamedRuns, task: str) -> Iterator[Group]:
    """The results of a task by training context, text and the checkpoint's tokens.

    Members are in the order of the runs.
    """
    found: dict[tuple[int, str], dict[int, list[EvaluatedRun]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in named.runs:
        for evaluated in run.evaluations.get(task, ()):
            if evaluated.rows:
                one = EvaluatedRun(run, evaluated)
                found[run.context, evaluated.label.text][one.tokens].append(one)
    for (context, text), by_tokens in sorted(found.items()):
        for tokens, members in sorted(by_tokens.items()):
            suffix, where, why = named.suffix, named.where, named.split_by
            if len(by_tokens) > 1:
                suffix += f"_after{tokens:012d}"
                where += f", after {tokens:,} tokens"
                why = f"{why} Checkpoints of more or fewer tokens have figures of their own."
            yield Group(context, text, members, suffix, where, why.strip())


def setting(named: NamedRuns, one: EvaluatedRun) -> Row:
    """The values of SETTING."""
    step = one.evaluated.label.step
    return [one.run.name, named.label(one.run), step, one.scaling or "as trained"]
