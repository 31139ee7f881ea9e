"""`longhaul` with a trace: what each training step was given goes to trace.jsonl, at once.

Not a test; started by tests as a process, so that they can kill it. While rank 0 validates there is
a file `validating`, and while it evaluates, a file `evaluating`.
LONGHAUL_FAULT=RANK:STEP:FAULT makes a rank `sleep` in the update after a step, for ever, `raise`
there, be `slow`, or have a `nan` in a gradient or a `spike` in its loss; STEP- is every update from
there on.
LONGHAUL_CLOCK=STEP:SECONDS sets the clock so much on in the update after a step, or back.
LONGHAUL_UNSAMPLED=1 keeps the profiler from looking at updates.
"""

import importlib
import json
import math
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch


def _is_now(when: str, step: int) -> bool:
    first = int(when.removesuffix("-"))
    return step == first or (when.endswith("-") and step > first)


def trace(file: Path) -> None:
    from longhaul.modules.pretraining import Pretraining

    original = Pretraining.training_step
    step, _, seconds = os.environ.get("LONGHAUL_CLOCK", f"{1 << 60}:0").partition(":")
    clock = Clock(int(step), int(seconds))

    def training_step(self: Pretraining, batch: dict[str, Any], batch_idx: int) -> None:
        clock.update(self.progress.step)
        line = {
            "step": self.progress.step,
            "index": batch["index"].tolist(),
            "crc": zlib.crc32(batch["input"].numpy().tobytes() + batch["target"].numpy().tobytes()),
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.close(descriptor)
        rank, when, fault = os.environ.get("LONGHAUL_FAULT", "::").split(":")
        if fault and int(rank) == self.global_rank and _is_now(when, self.progress.step):
            if fault == "sleep":
                time.sleep(3600)
            if fault == "raise":
                raise RuntimeError("no such luck")
            if fault == "slow":
                time.sleep(0.3)
                original(self, batch, batch_idx)
                return
            if fault == "spike":
                loss = self.model.loss
                self.model.loss = lambda *batch, **named: loss(*batch, **named) + 100  # type: ignore[method-assign]
                original(self, batch, batch_idx)
                del self.model.loss
                return
            parameter = next(self.model.parameters())
            handle = parameter.register_hook(lambda gradient: gradient * math.nan)
            original(self, batch, batch_idx)
            handle.remove()
            return
        original(self, batch, batch_idx)

    Pretraining.training_step = training_step  # type: ignore[method-assign]
    if os.environ.get("LONGHAUL_UNSAMPLED"):
        from longhaul.pipeline.training import profiling

        profiling._is_sampled = lambda number: False


def mark(name: str, file: Path) -> None:
    """Let a file be there while rank 0 is in a function that the training calls."""
    from longhaul.pipeline.training import evaluating

    original = getattr(evaluating, name)

    def marked(*arguments: Any, **options: Any) -> Any:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return original(*arguments, **options)
        file.touch()
        result = original(*arguments, **options)
        file.unlink()
        return result

    setattr(evaluating, name, marked)


class Clock:
    """The time of day, as if somebody had set it at an update."""

    def __init__(self, step: int, seconds: int) -> None:
        self._step, self._seconds, self._offset = step, seconds, 0
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + self._offset
        time.time_ns = lambda: real_ns() + self._offset * 10**9

    def update(self, step: int) -> None:
        if step >= self._step:
            self._offset = self._seconds


def fail_in_a_task(rank: str, name: str) -> None:
    """Let an evaluation task fail on one rank alone, after it has exchanged what is to be done."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no such luck")

    if os.environ.get("LOCAL_RANK", "0") == rank:
        importlib.import_module(f"longhaul.pipeline.evaluation.tasks.{name}").measure = fail


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        trace(Path("trace.jsonl"))
        mark("measure_positions", Path("validating"))
        mark("evaluate", Path("evaluating"))
        if failing := os.environ.get("LONGHAUL_FAILING_TASK"):
            fail_in_a_task(*failing.split(":"))
    from longhaul.pipeline.cli import main

    sys.exit(main())
