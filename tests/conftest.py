"""Triton's kernels run in its interpreter, on any machine, wherever a test asks for them."""

import os

import pytest

# Before anything imports Triton: many packages do, and what it decorates is then compiled for good.
os.environ.setdefault("TRITON_INTERPRET", "1")

_FIRST = ("slurm", "pipeline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and mostly waits begins first: nothing long is left to one worker alone."""

    def turn(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=turn)
