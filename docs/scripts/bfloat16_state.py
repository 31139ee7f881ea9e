"""The error of a bfloat16 state over many steps, for docs/kernels.md.

    python docs/scripts/bfloat16_state.py [TOKENS]

Queries, keys and values are random, so that values average out: with a long memory outputs are
small beside the state's entries, which makes it a hard case. Prints the relative error of the last
sixteenth of the outputs against float64, for gates that forget slowly and fast.
"""

import sys

import torch
from torch import Tensor

from longhaul.kernels import PowerState, power_attention_step, state_features

_B, _K = 4, 16
_GATES = (1.0, 0.9999, 0.999, 0.99)
_KINDS = ("float32", "bfloat16, to nearest", "bfloat16, at random")


def outputs(inputs: list[Tensor], gate: float, kind: str) -> Tensor:
    """The last sixteenth of the outputs, (tokens, B, K) in float64."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    P = state_features(_K, 2)
    state = PowerState(torch.zeros(_B, 1, P, _K, dtype=dtype), torch.zeros(_B, 1, P, dtype=dtype))
    if kind == "bfloat16, at random":
        state = state.to_bfloat16()
    log_g = torch.full((_B, 1, 1), gate, dtype=torch.float64).log().to(dtype)
    T = inputs[0].shape[1]
    kept = []
    for t in range(T):
        token = (x[:, t : t + 1].to(dtype) for x in inputs)
        out, state = power_attention_step(state, *token, log_g, inplace=True)
        if kind == "bfloat16, to nearest":
            state.kv.copy_(state.kv.bfloat16())
        if t >= T - T // 16:
            kept.append(out[:, 0, 0].double())
    return torch.stack(kept)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    T = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
    inputs = [torch.randn(_B, T, 1, _K) for _ in range(3)]
    print(f"| gate | {' | '.join(_KINDS)} |", "|---|" + "---|" * len(_KINDS), sep="\n")
    for gate in _GATES:
        exact = outputs(inputs, gate, "float64")
        errors = [(outputs(inputs, gate, kind) - exact).norm() / exact.norm() for kind in _KINDS]
        print(f"| {gate} |", *(f"{error:.2g} |" for error in errors), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
