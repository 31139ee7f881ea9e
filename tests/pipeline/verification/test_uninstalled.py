"""A checkout runs without an installation, and so do the processes that it starts."""

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent.parent
# Without .pth files, which is how an editable installation is found.
BARE = """#!/bin/sh
PYTHONPATH="$PYTHONPATH:{packages}" exec {python} -S "$@"
"""
SPAWNED = """
import multiprocessing, os, sys
from longhaul.pipeline.verification.workers import Job, run_jobs
if __name__ == "__main__":
    run_jobs([Job(os.path.realpath, (sys.argv[1],), 60)], num_processes=1, deadline=float("inf"),
             ended=lambda number, outcome: print(outcome.status, outcome.result))
"""


def test_a_checkout_runs_uninstalled(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("pipeline", "modules", "kernels", "datamodules", "configs", "slurm"):
        (checkout / name).symlink_to(CHECKOUT / name)
    (checkout / "uninstalled.sh").write_text((CHECKOUT / "uninstalled.sh").read_text())
    python = tmp_path / "python"
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    python.write_text(BARE.format(packages=packages, python=sys.executable))
    python.chmod(0o755)
    command = ["sh", str(checkout / "uninstalled.sh"), "--version"]
    environment = os.environ | {"PYTHON": str(python)}
    for _ in range(2):  # The links are there at the second time.
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.stdout.startswith("longhaul "), done.stderr
    spawning = tmp_path / "spawning.py"
    spawning.write_text(SPAWNED)
    done = subprocess.run(
        [python, "-P", spawning, "/"],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(checkout / ".typing")},
        cwd=tmp_path,
    )
    assert done.stdout == "returned /\n", done.stderr
