"""The autotuner's keys, which it writes to disk as JSON on a GPU but not in the interpreter."""

import json
import os
import subprocess
import sys

import pytest

KEYS = """
import json
from longhaul.kernels.power.triton.chunked import key_gradient, query_gradient, read, state
from longhaul.kernels.power.triton import tile_sizes
from longhaul.kernels.power.triton.launch import _autotuned

keys = {}
for module in (key_gradient, query_gradient, read, state):
    for name, kernel in vars(module).items():
        if name.startswith("_power_") and name.endswith("_kernel"):
            keys[name] = _autotuned(kernel, tile_sizes.STATE.narrow).keys
print(json.dumps(keys))
"""


@pytest.mark.wide
def test_keys_of_the_autotuner_can_be_written_as_json() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS], check=True, capture_output=True, text=True, env=environment
    )
    keys = json.loads(done.stdout)
    assert "_power_fwd_read_kernel" in keys
    for params in keys.values():
        assert "DEGREE" in params
        # A Triton dtype, which json refuses.
        assert "DOT" not in params
