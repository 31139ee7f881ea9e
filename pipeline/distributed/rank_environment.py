"""The environment variables with which a rank computes and communicates."""

import os
import sys
from collections.abc import Mapping

from longhaul.configs import RunConfig
from longhaul.pipeline.runs.folder import RunFolder

FLIGHT_RECORD = "nccl-rank-"
"""What the names of NCCL's flight records begin with, in the run's logs/; the rank follows."""

_RECORD_FILE = "TORCH_FR_DUMP_TEMP_FILE"
# With it ranks connect over Gloo when they first exchange something. Without it each group connects
# every rank with every other at the start: all notice at once that one has died, but it takes rank
# 0 0.4 s of processor time with 64 ranks and 7 s with 256.
_LAZY = "TORCH_GLOO_LAZY_INIT"
_MOST_CONNECTED = 64  # ranks


def rank_environment(config: RunConfig, given: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """The variables to set before CUDA, NCCL and Gloo start.

    Args:
        config: of the run.
        given: the variables that are set already.
        gpu: whether the run computes on GPUs.
    """
    variables = dict[str, str]()
    is_large = config.trainer.world_size > _MOST_CONNECTED
    if is_large and _LAZY not in given and sys.platform == "linux":  # elsewhere Gloo cannot
        variables[_LAZY] = "1"
    if not gpu:
        # What asks torch for the name, memory or random state of a GPU finds none either.
        return {**variables, "CUDA_VISIBLE_DEVICES": ""}
    if _RECORD_FILE not in given:
        # Where NCCL leaves its record if it finds a failure before the watchdog does.
        logs = RunFolder.of(config).log_file.parent
        variables[_RECORD_FILE] = os.path.abspath(logs / FLIGHT_RECORD)
    if config.trainer.deterministic:
        variables |= {
            # By the name that cuBLAS documents for the same results on every run.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Nothing fixes the order of sums that are made inside of a switch, and which algorithm
            # NCCL takes depends on its version, its plugins and the machine. Rings serve every
            # collective, and add in the order of the ranks.
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_COLLNET_ENABLE": "0",
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
        }
    return variables
