"""Warnings above figures and tables whose runs do not support a conclusion."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.variants import NamedRuns

_MOST_NAMES = 6


def caveats(
    named: NamedRuns,
    runs: Sequence[Run],
    losses: Mapping[str, float] | None = None,
    tokens: Callable[[Run], int] | None = None,
    *,
    text: str = "",
    split_by: str | None = None,
) -> list[str]:
    """What forbids conclusions from these runs; empty if nothing does.

    Args:
        named: the runs that are compared.
        runs: those that are drawn.
        losses: in nats per token, by run id; they are compared with a bigram model's. Of a run
            with several, it is the worst from which somebody may conclude.
        tokens: after how many a run is looked at; these are compared with its warm-up.
        text: the label of an evaluation's text; empty means the validation text.
        split_by: why other runs have figures of their own; None means what `named` says.
    """
    found = list(filter(None, [named.split_by if split_by is None else split_by]))
    bigram = named.bigram_loss(text)
    settings = _by_setting(named, runs)
    if losses is not None and math.isfinite(bigram):
        known = {
            name: [losses[run.run_id] for run in own if run.run_id in losses]
            for name, own in settings.items()
        }
        means = {name: fmean(values) for name, values in known.items() if values}
        worse = [f"{name} ({means[name]:.2f})" for name in means if means[name] >= bigram]
        if worse:
            found.append(
                f"No conclusion: not better than a bigram model ({bigram:.2f} nats per token): "
                f"{_listed(worse)}."
            )
    if tokens is not None:
        early = [
            name
            for name, own in settings.items()
            if any(tokens(run) <= run.config.optim.schedule.warmup_tokens for run in own)
        ]
        if early:
            names = _listed(early)
            found.append(f"No conclusion: within the warm-up of the learning rate: {names}.")
    single = [name for name, own in settings.items() if len({run.seed for run in own}) == 1]
    if single:
        found.append(
            f"No conclusion about differences: one seed of {_listed(single)}; another seed may "
            "differ as much."
        )
    unfinished = sum(not run.is_finished for run in runs)
    if unfinished and unfinished == len(runs):
        found.append("Unequal tokens: none of these runs has finished.")
    elif unfinished:
        found.append(
            f"Unequal tokens: {unfinished} {'run' if unfinished == 1 else 'runs'} that did not "
            "finish stand beside finished ones, with hollow markers."
        )
    return found


def unmeasured(named: NamedRuns) -> list[str]:
    """What stands once above all figures: for each text whose bigram model nobody has measured."""
    return [
        f"Not measured: whether these models{part.where} are better than a bigram model of the "
        "training text. longhaul evaluate RUN --tasks bigram measures it, for any one of the runs."
        for part in named.comparable()
        if not math.isfinite(part.bigram_loss())
    ]


def extrapolation(context: int, longest: float) -> list[str]:
    """What stands above results at lengths, up to the longest, by models of a training context."""
    if longest <= context:
        return []
    return [
        f"Lengths beyond the training context of {context:,} tokens measure extrapolation: "
        "train at the context you compare at."
    ]


def seeds_of(named: NamedRuns, runs: Sequence[Run]) -> str:
    """How many seeds each variant has at each context, for a caption."""
    seeds: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        if run.is_finished:
            seeds[named.variant(run)][run.context].add(run.seed)
    words = []
    for variant, by_context in seeds.items():
        numbers = [len(of_context) for of_context in by_context.values()]
        low, high = min(numbers), max(numbers)
        words.append(f"{variant} {low}" + (f" to {high}" if high > low else ""))
    return f"Seeds: {', '.join(words)}." if words else ""


def _by_setting(named: NamedRuns, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The finished runs by variant, and context where there are several."""
    is_one = len({run.context for run in runs}) == 1
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.is_finished:
            found[named.variant(run) + ("" if is_one else f" at {run.context:,}")].append(run)
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
