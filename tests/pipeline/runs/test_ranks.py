"""Processes that evaluate together; tests/pipeline/evaluation/test_together.py starts real ones."""

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longhaul.pipeline.runs.ranks import Ranks, _measure, measure_together


def test_results_are_exchanged_over_gloo_on_gpus_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    backends: list[Any] = []

    def measure(ranks: Ranks) -> None:
        backends.append(dist.get_backend_config(ranks.group))
        assert ranks.gather(["a result"]) == ["a result"]

    _measure(0, 1, str(tmp_path), None, measure, (), {})
    assert devices == [0]
    assert "nccl" not in backends[0]
    assert not dist.is_initialized()


def leave_late(ranks: Ranks) -> None:
    """In all processes but the first, close the connections after it has closed its own."""
    if not ranks.is_first:
        close = dist.destroy_process_group

        def close_late() -> None:
            time.sleep(1)
            close()

        dist.destroy_process_group = close_late


@pytest.mark.wide
def test_a_process_that_leaves_late_still_finds_what_it_closes() -> None:
    # In a process of its own: where another rank fails, the first ends its whole process.
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "others: []\n"), done.stderr


if __name__ == "__main__":
    measure_together(2, leave_late)
    print("others:", multiprocessing.active_children())
