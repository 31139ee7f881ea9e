"""What to change in a run that found no memory left on a GPU."""

import multiprocessing
import os
from contextlib import suppress

from longhaul.configs import RunConfig
from longhaul.datamodules.files.untrusted import open_to_write
from longhaul.pipeline.planning.fit import smallest_change
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.system.waiting import ADVICE_S
from longhaul.pipeline.training.post_mortem import OutOfGpuMemory


def with_advice(error: OutOfGpuMemory, config: RunConfig) -> RuntimeError:
    """The error with the smallest change that would fit, which the run's log gets as well."""
    line = f"{error}; {_advice(config, error.memory_bytes)}"
    with suppress(OSError):
        log = open_to_write(RunFolder.of(config).log_file, os.O_WRONLY | os.O_APPEND)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return RuntimeError(line)


def _advice(config: RunConfig, memory_bytes: int) -> str:
    # Planning needs simulated ranks, beside which this process cannot have its own.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        planned = pool.apply_async(smallest_change, (config, memory_bytes))
        try:
            change = planned.get(ADVICE_S)
        except Exception:  # Whatever planning met, the run's own error is what counts.
            return "halve it, or set trainer.activation_checkpointing=light"
    if change is None:
        return "no smaller one would fit, nor any strategy here"
    return f"the smallest change that would fit: {change}"
