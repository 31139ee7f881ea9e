"""`longhaul` with a trace: what each training step was given goes to trace.jsonl, at once.

Not a test; started by tests as a process, so that they can kill it.
LONGHAUL_FAULT=RANK:STEP:FAULT makes a rank `sleep` in the update after a step, for ever, `raise`
there, or have a `nan` in a gradient; STEP- is every update from there on.
"""

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

    def training_step(self: Pretraining, batch: dict[str, Any], batch_idx: int) -> None:
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
            parameter = next(self.model.parameters())
            handle = parameter.register_hook(lambda gradient: gradient * math.nan)
            original(self, batch, batch_idx)
            handle.remove()
            return
        original(self, batch, batch_idx)

    Pretraining.training_step = training_step  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        trace(Path("trace.jsonl"))
    from longhaul.pipeline.cli import main

    sys.exit(main())
