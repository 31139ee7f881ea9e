"""The calls of the delta rule that we compile for every chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longhaul.kernels.delta.call import DeltaCall, Inputs

NUM_CANDIDATES = 2
"""The number of configurations that each of the op's kernels has to choose from."""

_CHUNK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call in bfloat16, both passes: two chunks, B is 2, 4 heads of values, 2 of keys."""

    gates: str  # "none", "scalar", "channel"
    K: int
    V: int
    erases: bool = True
    packed: bool = False  # two documents, one of an odd length, with initial and final states

    @property
    def name(self) -> str:
        marks = " not erased" * (not self.erases) + " packed" * self.packed
        return f"delta {self.gates} K{self.K} V{self.V}{marks}"

    def launch(self) -> None:
        """Run the launchers with every configuration, on tensors of zeros."""
        # Imported here, as compiling other kernels must work even if these cannot be imported.
        from longhaul.kernels.common.triton.launch import configuration

        for index in range(NUM_CANDIDATES):
            with configuration(index):
                self._launch()

    def _launch(self) -> None:
        from longhaul.kernels.delta import triton

        B, T, H, G = 2, 2 * _CHUNK_SIZE, 4, 2
        if self.packed:
            B, T = 1, T + 1
        k = torch.zeros(B, T, G, self.K, dtype=torch.bfloat16)
        v = torch.zeros(B, T, H, self.V, dtype=torch.bfloat16)
        widths = (self.K,) if self.gates == "channel" else ()
        inputs = Inputs(
            k,
            v,
            k,
            torch.zeros(B, T, H) if self.erases else None,
            None if self.gates == "none" else torch.zeros(B, T, H, *widths),
            torch.zeros(2, H, self.K, self.V) if self.packed else None,
            torch.tensor([0, _CHUNK_SIZE // 2 + 1, T]) if self.packed else None,
        )
        call = DeltaCall(
            scale=1.0,
            chunk_size=_CHUNK_SIZE,
            output_final_state=self.packed,
            keeps_states=False,
        )
        after = triton.forward(call, inputs)
        assert after.out is not None
        triton.backward(call, inputs, k, torch.zeros_like(after.out), after.state)


SHAPES: tuple[Shape, ...] = (
    Shape(gates="scalar", K=64, V=64),
    Shape(gates="channel", K=64, V=64),
    Shape(gates="none", K=128, V=128),
    Shape(gates="scalar", K=128, V=128),
    Shape(gates="scalar", K=256, V=512),
    Shape(gates="channel", K=128, V=128),
    Shape(gates="channel", K=128, V=256, erases=False),
    Shape(gates="scalar", K=64, V=64, packed=True),
)
