"""Peak memory of the Triton launchers at T 65,536, counted without a GPU.

Launches only compile, so tensors are allocated and never written. The peak is the size of all live
tensors, as on a GPU except for the rounding of its allocator.
"""

import os
import subprocess
import sys

import pytest

COUNT = """
import sys
import weakref
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from longhaul.kernels.offline import recording
from longhaul.kernels.power import triton
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.cost import choose_chunk_size, keeps_states
from longhaul.kernels.shapes import state_features


class Alive(TorchDispatchMode):
    now = peak = 0

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def drop(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if not isinstance(x, torch.Tensor) or x.untyped_storage()._cdata in self.sizes:
                continue
            storage = x.untyped_storage()
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, storage._cdata)
        return result


T, H, K = 65536, int(sys.argv[1]), 64
C = choose_chunk_size(T, K, K, 2, "triton")
alive = Alive()
with recording("sm_90"), alive:
    q, k, v = (torch.empty(1, T, H, K, dtype=torch.bfloat16) for _ in range(3))
    log_g = torch.empty(1, T, H)
    inputs = alive.now
    call = PowerCall(
        degree=2, scale=0.125, normalize=True, output_final_state=False, form="chunked",
        chunk_size=C, keeps_states=keeps_states(
            T, T // C, K, K, 2, token_bytes=2, state_bytes=2
        ),
    )
    after = triton.forward(call, q, k, v, log_g, None, None, None)
    saved = Saved(
        q, k, v, log_g, None, None, None, after.out, None, None, after.inverse, after.is_live,
        after.chunk_kv, after.chunk_norm,
    )
    grads = triton.backward(
        call, saved, torch.empty_like(after.out), None, None, (True,) * 4 + (False,) * 2
    )
states = T // C * H * state_features(K, 2) * (K + 1) * 4
print(alive.peak, inputs, states)
"""


# With 12 heads programs walk through sequences, so no sums are in memory in float32.
@pytest.mark.wide
@pytest.mark.parametrize(("heads", "times_inputs"), [("8", 4), ("12", 3)])
def test_peak_is_below_some_times_the_inputs_and_one_state_per_chunk(
    heads: str, times_inputs: int
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT, heads]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    peak, inputs, states = map(int, done.stdout.split())
    print(f"peak {peak:,} bytes, inputs {inputs:,}, one state per chunk {states:,}")
    assert inputs > 200e6
    assert peak < times_inputs * inputs + states
    # The count is not trivially small: inputs, output and gradients, and one array of states.
    assert peak > 2 * inputs + states
