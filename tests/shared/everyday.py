"""Which parameters of a test `make test` has."""

from collections.abc import Iterable
from typing import Any

import pytest


def everyday(every: Iterable[Any], shown: Iterable[Any]) -> list[Any]:
    """Every parameter, or tuple of parameters; those that are not shown are in the wide suite."""
    every, shown = list(every), list(shown)
    assert all(one in every for one in shown)
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in shown else pytest.mark.wide,
        )
        for one in every
    ]
