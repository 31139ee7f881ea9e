"""The axes of a sweep: which keys vary, and which of them together."""

import itertools
from collections.abc import Sequence

from longhaul.configs import ConfigError
from longhaul.configs.fields import run_fields

# Made from the values of the others, or shared by all runs.
_FIXED_KEYS = ("name", "root", "tracking.parent_run_id")


def combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, in the order in which a config has their keys.

    The order of the axes decides in which order the runs are trained, and nothing else.

    Args:
        axes: `key.sub=A,B`, of which all combinations are made; or `key.sub,other=A:1,B:2` for
            keys that vary together.

    Raises:
        ConfigError: an axis is written in another way, or has a key that a sweep decides.
    """
    values = [_values(axis) for axis in axes]
    return [
        tuple(sorted(itertools.chain(*each), key=_place)) for each in itertools.product(*values)
    ]


def _place(override: str) -> tuple[int, str, bool, str]:
    """Sorts by the part of the config, then by name, with a kind before its options."""
    key = override.partition("=")[0]
    part, _, _ = key.partition(".")
    parts = list(run_fields())
    above, _, last = key.rpartition(".")
    return parts.index(part) if part in parts else len(parts), above, last != "kind", last


def _values(axis: str) -> list[list[str]]:
    """The overrides of each value of an axis."""
    keys, equals, listed = axis.partition("=")
    names = keys.split(",")
    if not (all(names) and equals and listed):
        raise ConfigError(f"--sweep: found {axis!r}, wanted key.sub=A,B")
    for key in names:
        if key in _FIXED_KEYS:
            raise ConfigError(
                f"--sweep: found {axis!r}, wanted another key: all runs of a sweep are in one root "
                "below one parent, and named after their values"
            )
    if len(names) == 1:
        return [[f"{keys}={value}"] for value in listed.split(",")]
    rows = [value.split(":") for value in listed.split(",")]
    for row in rows:
        if len(row) != len(names):
            raise ConfigError(
                f"--sweep: found {':'.join(row)!r} for {keys}, wanted {len(names)} values with "
                "colons between them, one for each key"
            )
    return [[f"{key}={value}" for key, value in zip(names, row, strict=True)] for row in rows]
