"""Templates of Slurm job scripts, filled by pipeline/cluster/scripts.py.

train.sbatch decides whether its job is requeued (`requeue_if_useful`).
"""
