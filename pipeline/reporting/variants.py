"""The name, colour and marker of each run, the same in all figures."""

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from longhaul.configs import RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.pipeline.evaluation.figures import COLOURS, KIND_COLOURS
from longhaul.pipeline.reporting.runs import Data, Run

# Runs of one kind are different variants if their data or any of these settings differ. The context
# is not among them, since it is an axis of figures, nor is the seed, nor is the path of the data:
# one path may lead to different data, and the same data may lie in several places.
_DECISIVE = (
    *("model.", "optim.", "data.short_first"),
    *("trainer.precision", "trainer.start_from", "trainer.train_only"),
)
# Settings below those that do not change results.
_INDIFFERENT = (".chunk_size", ".max_skipped_updates", ".spike_sigma", ".on_spike")

_SAME_LOSS = 0.005
"""Nats by which a bigram model's loss differs at most where it is drawn as one line."""

_DIGEST_CHARACTERS = 8  # of the hash of data, where a name is not enough

_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


LEADING_COLUMNS = ("run", "run_id", "status", "variant", "training_context")
"""The first columns of every CSV of runs."""


@dataclass(frozen=True)
class Look:
    """Colour, marker and line style of a variant."""

    colour: str
    marker: str
    line: str


class NamedRuns:
    """Runs in the order of all legends and tables, with their names, colours and markers.

    Args:
        runs: at least one of them finished.
        sequences: after how many training losses are compared; None means the most that all
            finished runs of one budget have read.
        reference: the kind that gaps are to; None means softmax, or else the first kind.

    Raises:
        ValueError: no run has read so many sequences, or none is of that kind.
    """

    def __init__(
        self, runs: Sequence[Run], sequences: int | None = None, reference: str | None = None
    ) -> None:
        of_all = _read_by_all(runs)
        most = max(run.tokens // run.context for run in runs)
        if sequences is not None and sequences > most:
            raise ValueError(
                f"--sequences: found {sequences}, wanted at most {most}, which one run has read, "
                f"or {of_all}, which all finished runs have"
            )
        found = sorted({run.kind for run in runs})
        if reference is not None and reference not in found:
            raise ValueError(f"--against: found {reference!r}, wanted {' or '.join(found)}")
        self.reference = reference or ("softmax" if "softmax" in found else found[0])
        self._asked_sequences = sequences
        self.sequences = of_all if sequences is None else sequences
        names = name_variants([run.config for run in runs], [run.data for run in runs])
        self._variants = {run.run_id: name for run, name in zip(runs, names, strict=True)}
        kinds = (run.kind for run in runs)
        self._looks = looks(dict(zip(names, kinds, strict=True)))
        self.runs = sorted(
            runs, key=lambda run: (self.label(run), run.context, run.name, run.run_id)
        )
        self.suffix = ""
        """Of the names of files about these runs, where others have files of their own."""
        self.where = ""
        """What the titles of those say."""
        self.split_by = ""
        """A sentence on why others have files of their own; empty where there are none."""

    def only(self, runs: Sequence[Run], suffix: str, where: str, split_by: str) -> "NamedRuns":
        """Some of these runs, under the same names and looks, with figures of their own."""
        some = copy.copy(self)
        some.runs = [run for run in self.runs if run in runs]
        if self._asked_sequences is None:
            some.sequences = _read_by_all(runs)
        some.suffix, some.where = self.suffix + suffix, self.where + where
        some.split_by = " ".join(filter(None, (self.split_by, split_by)))
        return some

    def comparable(self) -> "list[NamedRuns]":
        """Parts with one text each, in training and validation, and so with one tokenizer."""
        texts: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            texts[run.data.sha256, run.validation_data].append(run)
        if len(texts) == 1:
            return [self]
        parts = []
        for number, ((sha256, _), runs) in enumerate(sorted(texts.items()), start=1):
            tokenizer = f", tokenizer {runs[0].tokenizer}" if runs[0].tokenizer else ""
            parts.append(
                self.only(
                    runs,
                    f"_data{number}",
                    f", on {runs[0].data.name} {sha256[:_DIGEST_CHARACTERS]}{tokenizer}",
                    "Runs of other training or validation data, or tokenizers, have figures of "
                    "their own, since losses on different text, or by different tokens, cannot "
                    "be compared.",
                )
            )
        return parts

    def at_equal_tokens(self, *, in_each_context: bool = False) -> "list[NamedRuns]":
        """Parts whose trainings have the same number of tokens, at least in each context."""
        budgets: dict[int, list[Run]] = defaultdict(list)
        for run in self.runs:
            budgets[run.budget].append(run)
        settings = {(run.context, run.budget) for run in self.runs}
        if len(budgets) == 1 or (in_each_context and len(settings) == len(self.contexts)):
            return [self]
        return [
            self.only(
                runs,
                f"_after{tokens:012d}",
                f", after {tokens:,} tokens",
                "Runs of more or fewer tokens have figures of their own.",
            )
            for tokens, runs in sorted(budgets.items())
        ]

    @property
    def bytes_per_token(self) -> float:
        """Of the validation text; NaN where no run has counted them, or these have several."""
        known = {run.bytes_per_token for run in self.runs if math.isfinite(run.bytes_per_token)}
        is_one = len({run.validation_data for run in self.runs}) == 1
        return fmean(known) if known and is_one else math.nan

    def bigram_loss(self, text: str = "") -> float:
        """The mean loss of a bigram model; NaN where nobody has measured one on this text.

        Args:
            text: the label of an evaluation's text; empty means the validation text.
        """
        losses = self._bigram_losses(text)
        return fmean(losses) if losses else math.nan

    def bigram_line(self, text: str = "", context: int | None = None) -> tuple[str, float] | None:
        """The label and height of a bigram model's line; None where there is none, or several.

        Args:
            text: the label of an evaluation's text; empty means the validation text.
            context: its own measurements go before those of other contexts.
        """
        losses = self._bigram_losses(text, context) or self._bigram_losses(text)
        if not losses or max(losses) - min(losses) > _SAME_LOSS:
            return None
        return "bigram model", fmean(losses)

    def _bigram_losses(self, text: str, context: int | None = None) -> list[float]:
        return [
            bigram.rows[0]["value"]
            for run in (self.runs if context is None else self.at(context))
            for bigram in run.evaluations.get("bigram", ())
            if bigram.label.text == text
        ]

    @property
    def contexts(self) -> list[int]:
        return sorted({run.context for run in self.runs})

    def at(self, context: int) -> list[Run]:
        return [run for run in self.runs if run.context == context]

    def variant(self, run: Run) -> str:
        return self._variants[run.run_id]

    def look(self, run: Run) -> Look:
        return self._looks[self.variant(run)]

    def label(self, run: Run) -> str:
        """The label in legends, which marks unfinished runs."""
        mark = "" if run.is_finished else f" ({run.status.lower()})"
        return self.variant(run) + mark

    def leading_cells(self, run: Run) -> list[str | int]:
        """The values of LEADING_COLUMNS."""
        return [run.name, run.run_id, run.status, self.variant(run), run.context]


def name_variants(configs: Sequence[RunConfig], data: Sequence[Data]) -> list[str]:
    """Each run's kind and degree, and the settings in which it differs from others of that kind.

    A setting at its default is not named, unless another one that differs has the same last name.

    Where not all runs are trained on the same data, every name tells which, since losses on
    different data cannot be compared, also those of different kinds.
    """
    data_names = _data_names(data)
    kinds = [_kind(config) for config in configs]
    options = [_options(config) for config in configs]
    names = []
    for config, kind, own, trained_on in zip(configs, kinds, options, data, strict=True):
        same_kind = [other for one, other in zip(kinds, options, strict=True) if one == kind]
        keys = dict.fromkeys(key for other in same_kind for key in other)
        differing = [key for key in keys if len({str(other.get(key)) for other in same_kind}) > 1]
        uses = Counter(key.rpartition(".")[2] for key in differing)
        usual = _defaults(config)
        parts = [
            f"{name}={_shown(own.get(key))}"
            for key, name in ((key, key.rpartition(".")[2]) for key in differing)
            if uses[name] > 1 or key not in usual or own[key] != usual[key]
        ]
        if len(data_names) > 1:
            parts.insert(0, f"data={data_names[trained_on.sha256]}")
        names.append(", ".join([kind, *parts]))
    return names


def looks(kinds: Mapping[str, str]) -> dict[str, Look]:
    """A look for each variant, given its kind; variants take turns in alphabetical order.

    A kind has one colour, also with several degrees: that of KIND_COLOURS, or, for other kinds, one
    that is not taken. Its variants, and kinds with the same colour where there are more kinds than
    colours, differ in their markers and line styles. Variants of a single kind have a colour each.
    """
    has_one = len(set(kinds.values())) == 1
    family_of = {name: name if has_one else kind for name, kind in kinds.items()}
    families = sorted(set(family_of.values()))
    colours = {} if has_one else {one: KIND_COLOURS[one] for one in families if one in KIND_COLOURS}
    every = dict.fromkeys((*COLOURS, *KIND_COLOURS.values()))
    free = [one for one in every if one not in colours.values()]
    others = [family for family in families if family not in colours]
    colours |= {family: free[index % len(free)] for index, family in enumerate(others)}
    order = list(dict.fromkeys(colours[family] for family in families))
    found = {}
    taken = Counter[str]()
    for name in sorted(kinds, key=lambda name: (family_of[name], name)):
        colour = colours[family_of[name]]
        # From another marker on for each colour, so that print without colour shows it too.
        marker = _MARKERS[(order.index(colour) + taken[colour]) % len(_MARKERS)]
        found[name] = Look(colour, marker, _LINES[taken[colour] % len(_LINES)])
        taken[colour] += 1
    return found


def _read_by_all(runs: Sequence[Run]) -> int:
    """The most sequences that all finished runs, or all runs if none has finished, have read."""
    begun = [run for run in runs if run.losses]
    finished = [run for run in begun if run.is_finished]
    return min((run.tokens // run.context for run in finished or begun), default=0)


def _data_names(data: Sequence[Data]) -> dict[str, str]:
    """A short name for each hash, with the beginning of the hash where others have that name."""
    names: dict[str, str] = {}
    for one in sorted(data):
        names.setdefault(one.sha256, one.name)  # Copies in other folders have other names.
    uses = Counter(names.values())
    return {
        sha256: name if uses[name] == 1 else f"{name} {sha256[:_DIGEST_CHARACTERS]}"
        for sha256, name in names.items()
    }


def _kind(config: RunConfig) -> str:
    degree = getattr(config.model.attention, "degree", None)
    return "+".join(config.model.kinds) + ("" if degree is None else f" p={degree}")


def _options(config: RunConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if key.startswith(_DECISIVE) and not key.endswith(_INDIFFERENT)
    }


def _defaults(config: Any, prefix: str = "") -> dict[str, Any]:
    """The default of each setting of a config that has one, by its key as in `flatten`."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= _defaults(value, f"{key}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                found |= _defaults(entry, f"{key}.{name}.")
        elif field.default is not dataclasses.MISSING:
            found[key] = field.default
        elif field.default_factory is list:
            found[key] = []
    return found


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
