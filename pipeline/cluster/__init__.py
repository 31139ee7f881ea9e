"""Running on Slurm: the scripts of jobs, their submission, and their status.

Whether a job that ended is requeued is decided in its own script, by `requeue_if_useful` in
slurm/train.sbatch. This package writes the settings that the decision uses (slurm.requeue,
slurm.max_restarts) into that script.
"""
