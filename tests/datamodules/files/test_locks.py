"""Locks that another process holds, and whom they outlive."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from longhaul.datamodules.files.locks import is_locked, lock

# It has a child, as a trainer has data loader workers, which outlives it.
HOLDER = """
import os
import sys
import time
from longhaul.datamodules.files.locks import lock
file = open(sys.argv[1], "w")
lock(file.fileno())
worker = os.fork()
if not worker:
    time.sleep(60)
print(worker, flush=True)
time.sleep(60)
"""


def test_a_lock_is_seen_from_outside_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    path.touch()
    assert not is_locked(path)
    command = [sys.executable, "-P", "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            assert is_locked(path)
            with path.open("w") as file:
                assert not lock(file.fileno())
            holder.kill()
            holder.wait()
            assert Path(f"/proc/{worker}").exists()
            assert not is_locked(path)
            with path.open("w") as file:
                assert lock(file.fileno(), waits=True)
        finally:
            os.kill(worker, signal.SIGKILL)
