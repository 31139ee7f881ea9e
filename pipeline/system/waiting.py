"""All waiting times of pipeline, in seconds, and how they depend on each other.

tests/pipeline/system/test_waiting.py checks the sums. Users set `trainer.stop_seconds` and
`trainer.hang_seconds`. Waits for data workers are in datamodules/workers.py.
"""

# Ending a run. From a signal to stop, `trainer.stop_seconds` is for the update in progress, the
# save, UPLOAD_S and DISCONNECT_S. Slurm sends its signal that long and SLURM_DELAY_S before the
# time limit. Its srun kills the other ranks SLURM_WAIT_S after the first one has ended.
UPLOAD_S = 30.0
"""The end of a run waits for MLflow. The next start sends what MLflow has not taken by then."""
SLOW_UPLOAD_S = 120.0
"""Added to UPLOAD_S for a finished run: importing MLflow can take long on a busy machine."""
FAILURE_UPLOAD_S = 30.0
"""As UPLOAD_S, for a run that failed, which may have been before MLflow was imported."""
EVALUATION_UPLOAD_S = 60.0
"""As UPLOAD_S, for `longhaul evaluate`, which no scheduler is about to end."""
DISCONNECT_S = 30
"""Closing the connections between ranks: NCCL waits for a rank that died just now without end."""
SLURM_DELAY_S = 30
"""Slurm may send the signal before the time limit so much late, as it looks at jobs so often."""
SLURM_WAIT_S = 60
"""`srun --wait` in slurm/train.sbatch."""
END_RANKS_S = 30
"""A rank of this machine that has not ended this long after rank 0 is killed."""
ADVICE_S = 20.0
"""Planning a smaller run after GPU memory ran out, in a process that has yet to import torch."""
REPEATED_SIGNAL_S = 2.0
"""Signals within this time are one request: a scheduler may signal a job step and its script."""
CONNECT_S = 5.0
"""A signal waits for the ranks to connect, and Ctrl-C for Python to handle it."""

# Watching ranks. `trainer.hang_seconds` bounds an update; rank 0 reports it, other ranks 2 SILENT_S
# later, and collectives fail by themselves COLLECTIVE_S later.
HEARTBEAT_S = 1.0
FAIL_S = 5.0
"""A rank that waits for one that is gone has this long to fail by itself, and to say in what."""
LATE_S = 5.0
"""A thread that wakes up so much too late was stopped, with its process. It does not count."""
SILENT_S = 20.0
"""A rank is reported as silent after this long without a heartbeat."""
DEAD_S = 300.0
"""A silent rank is then taken for dead: its machine is gone or cut off.

It may also be stopped for a while, or hold Python's lock, as a compiler does for a minute.
"""
COLLECTIVE_S = 300.0
FLIGHT_RECORD_S = 5.0
"""NCCL's flight record is written while NCCL hangs."""

# Tracking.
FIRST_UPLOAD_S = 10.0
"""The first upload of a training waits this long for a first recorded value.

Importing MLflow takes seconds of processor time, and slows all other threads meanwhile.
"""
UPLOAD_EVERY_S = 2.0
SYSTEM_METRICS_EVERY_S = 10.0
MAX_BACKOFF_S = 30.0
ANSWER_S = 5.0
"""A server that does not answer in this time is taken for unreachable, before it is needed."""
REQUEST_S = 30.0
"""A slow server may need seconds for a thousand rows; one that hangs must not block for long."""
LOCK_AGAIN_S = 120.0
"""A file server may take a crashed node's lock as held until it notices that the node is gone."""

# Other programs and processes.
POLL_S = 0.2
"""Between two looks at a child process, or at a file of another machine."""
QUEUE_S = 300.0
"""A controller with thousands of jobs is slow, and sbatch asks one that is down again."""
SQUEUE_S = 20.0
GIT_S = 10
MACHINE_S = 20
"""nvidia-smi and other programs that describe the machine."""
EVALUATION_FAIL_S = 3.0
"""After another process of an evaluation failed, this one may fail with a message of its own."""

# Checks of `longhaul doctor`.
CHECK_S = 8.0
GIT_CHECK_S = 12.0
GPU_CHECK_S = 90.0
"""Creates contexts on all GPUs of a node, or connects them. GPUs not used yet are slow."""
GLOO_CHECK_S = 60.0
"""An all-reduce over gloo, which raises an error by itself when nothing moves."""
COMPILING_S = 120.0
"""Compiles, on file systems that may be slow."""
MEET_S = 180.0
"""Nodes wait for each other: the checks of one may take that much longer than those of another."""
WRITING_S = 2.0
READING_S = 5.0
