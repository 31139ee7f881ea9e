"""A table of what was done to trainings, and how they ended."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

SEED = int(os.environ.get("LONGHAUL_SEED", "35"))
KILLED = -signal.SIGKILL
COMMON = [
    *("trainer.micro_batch=2", "trainer.hang_seconds=60", "checkpoint.every_tokens=2048"),
    *("evaluation.tasks=[perplexity]", "evaluation.every_tokens=10240"),
    # The rate of the papers: at a larger one, the order of sums alone moves losses.
    "optim.learning_rate=6e-4",
]


class Row(NamedTuple):
    """A try."""

    kind: str
    way: str
    when: str
    end: str
    seconds: float
    said: str


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.kind, row.way].append(row)
    print(f"\n{len(rows)} tries, seed {SEED}")
    print("| run | what was done | tries | ends | slowest end, s |\n|---|---|---|---|---|")
    for (kind, way), group in groups.items():
        ends = ", ".join(sorted({row.end for row in group}))
        print(f"| {kind} | {way} | {len(group)} | {ends} | {max(r.seconds for r in group):.1f} |")


def note(table: list[Row], row: Row) -> None:
    table.append(row)
    print(f"\n| {row.kind} | {row.way} | {row.when} | {row.end} | {row.seconds:.1f} | {row.said} |")


def said_last(error: str) -> str:
    lines = [line for line in error.splitlines() if line.startswith("longhaul:")]
    return lines[-1][:160] if lines else ""


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.003)
