"""What holds for all tests: where Triton's kernels run, how processes start, what is first."""

import os
from pathlib import Path

import pytest

# Triton's kernels run in its interpreter, on any machine, wherever a test asks for them. Before
# anything imports Triton: many packages do, and what it decorates is then compiled for good.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start leave out imports that nothing uses.
_PATHS = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

_FIRST = ("slurm", "pipeline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and mostly waits begins first: nothing long is left to one worker alone."""

    def turn(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=turn)
