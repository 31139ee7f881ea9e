"""Results of one task that belong into one figure or table, from all runs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from longhaul.pipeline.reporting.drawing import Row
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.tables import Evaluated
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

OPTIONS = tuple(dict.fromkeys(name for names in _PROTOCOLS.values() for name in names))
"""The names of all these columns."""


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
