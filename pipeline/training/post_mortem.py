"""What is left in a run's logs/ of a rank that hangs, or whose GPU has no memory left."""

import faulthandler
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from longhaul.configs import RunConfig
from longhaul.datamodules.files.untrusted import open_to_write
from longhaul.pipeline.distributed.rank_environment import FLIGHT_RECORD
from longhaul.pipeline.system.waiting import FLIGHT_RECORD_S
from longhaul.pipeline.terminal.numbers import in_bytes

# What torch's own functions for it, which it may change, raise on devices that they do not serve.
_UNSUPPORTED = (AttributeError, RuntimeError)


def record_memory() -> None:
    """Note from now on which line of code took each piece of a GPU's memory; 2 us a piece."""
    if torch.cuda.is_available():
        with suppress(*_UNSUPPORTED):
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")


def leave_stacks(logs: Path, rank: int) -> None:
    """Write the stacks of all threads of this process, and NCCL's record of its collectives.

    It never raises: it is called when a process is about to be ended.
    """
    with suppress(OSError), _new_file(logs / f"stacks-rank-{rank}.txt") as file:
        faulthandler.dump_traceback(file)
    # Builds of torch without NCCL do not have it.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return

    def record() -> None:
        # By this name torchfrtrace reads it.
        with suppress(OSError, RuntimeError):
            content = dump()
            with _new_file(logs / f"{FLIGHT_RECORD}{rank}") as file:
                file.write(content)

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    thread.join(FLIGHT_RECORD_S)


def _new_file(path: Path) -> BinaryIO:
    """A file that replaces the one of this name, if that is a regular file."""
    return open(open_to_write(path, os.O_WRONLY | os.O_TRUNC), "wb")


class OutOfGpuMemory(RuntimeError):
    """An update found no memory left on its GPU."""

    def __init__(self, message: str, memory_bytes: int) -> None:
        """`memory_bytes`: of the GPU, all together."""
        super().__init__(message)
        self.memory_bytes = memory_bytes


def explain(error: Exception, config: RunConfig, logs: Path, rank: int) -> Exception:
    """The error itself, or in place of one for want of a GPU's memory, an OutOfGpuMemory.

    Its message is the same on all ranks with the same GPUs, so that one of them tells it for all.
    The GPU's memory is then written to `logs`, too.
    """
    is_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    if not (is_of_memory and torch.cuda.is_available()):
        return error
    with suppress(OSError, *_UNSUPPORTED):
        file = logs / f"memory-rank-{rank}.pickle"
        _new_file(file).close()  # fails if something else has its name
        torch.cuda.memory._dump_snapshot(str(file))
    found = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return OutOfGpuMemory(
        f"trainer.micro_batch: found {config.trainer.micro_batch}, for which the {in_bytes(found)} "
        f"of a GPU were not enough; {logs}/memory-rank-*.pickle show what holds them "
        "(pytorch.org/memory_viz)",
        found,
    )
