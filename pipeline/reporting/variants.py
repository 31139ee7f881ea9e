"""The name, colour and marker of each run, the same in all figures."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longhaul.configs import RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.pipeline.evaluation.figures import COLOURS
from longhaul.pipeline.reporting.runs import Data, Run

# Runs of one kind are different variants if their data or any of these settings differ. The context
# is not among them, since it is an axis of figures, nor is the seed, nor is the path of the data:
# one path may lead to different data, and the same data may lie in several places.
_DECISIVE = (
    "model.",
    "optim.",
    "trainer.precision",
    "trainer.start_from",
    "trainer.train_only",
)
# Settings below those that do not change results.
_INDIFFERENT = (".chunk_size", ".max_skipped_updates", ".spike_sigma", ".on_spike")

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
            finished runs have read.

    Raises:
        ValueError: no run has read so many sequences.
    """

    def __init__(self, runs: Sequence[Run], sequences: int | None = None) -> None:
        read = [run.tokens // run.context for run in runs if run.is_finished and run.losses]
        of_all = min(read, default=0)
        most = max(run.tokens // run.context for run in runs)
        if sequences is not None and sequences > most:
            raise ValueError(
                f"--sequences: found {sequences}, wanted at most {most}, which one run has read, "
                f"or {of_all}, which all finished runs have"
            )
        self.sequences = of_all if sequences is None else sequences
        names = name_variants([run.config for run in runs], [run.data for run in runs])
        self._variants = {run.run_id: name for run, name in zip(runs, names, strict=True)}
        kinds = ("+".join(run.config.model.kinds) for run in runs)
        self._looks = looks(dict(zip(names, kinds, strict=True)))
        self.runs = sorted(
            runs, key=lambda run: (self.label(run), run.context, run.name, run.run_id)
        )

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
    """A look for each variant, given its kind; both take turns in alphabetical order.

    A kind has one colour, also with several degrees. Its variants, and kinds with the same colour
    where there are more kinds than colours, differ in their markers and line styles. Variants of a
    single kind have a colour each.
    """
    has_one = len(set(kinds.values())) == 1
    families = sorted(kinds) if has_one else sorted(set(kinds.values()))
    members = defaultdict(list)
    for name in sorted(kinds):
        members[families.index(name if has_one else kinds[name])].append(name)
    found = {}
    taken = [0] * len(COLOURS)
    for index, names in sorted(members.items()):
        colour = index % len(COLOURS)
        for name in names:
            # From another marker on for each colour, so that print without colour shows it too.
            marker = _MARKERS[(colour + taken[colour]) % len(_MARKERS)]
            line = _LINES[taken[colour] % len(_LINES)]
            found[name] = Look(COLOURS[colour], marker, line)
            taken[colour] += 1
    return found


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
    values = flatten(to_dict(config))
    return {
        key: value
        for key, value in values.items()
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
    return found


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
