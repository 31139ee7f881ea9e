"""Captures and restores the state of every random number generator of one process.

The states are tensors, because a checkpoint holds no other binary data. Restoring them unpickles
nothing.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.checkpoints.integrity import CheckpointError


def capture_rng() -> dict[str, Tensor]:
    """State of the generators of Python, NumPy (the global one) and torch (CPU and CUDA devices).

    Returns:
        CPU tensors: `python`, `numpy`, `torch`, and `cuda.N` for each visible device. Python
        and NumPy draw normal deviates in pairs and keep the second for the next call: the two
        `.gauss` entries hold (whether one is kept, its value).
    """
    version, words, kept = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    twister = numpy_state["state"]
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": _optional(kept),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"]], dtype=torch.int64),
        "numpy.gauss": _optional(numpy_state["gauss"] if numpy_state["has_gauss"] else None),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        for index, cuda_state in enumerate(torch.cuda.get_rng_state_all()):
            state[f"cuda.{index}"] = cuda_state
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Restore what `capture_rng` returned.

    A run may move to a machine with more or fewer devices. Devices without a saved state keep their
    current one, and saved states of missing devices are ignored.

    Raises:
        CheckpointError: it is something else.
    """
    for name, now in capture_rng().items():
        is_optional = name.startswith("cuda.")
        saved = state.get(name, now if is_optional else None)
        if saved is None or saved.shape != now.shape or saved.dtype != now.dtype:
            found = "nothing" if saved is None else f"shape {tuple(saved.shape)} of {saved.dtype}"
            raise CheckpointError(
                f"rng/{name}: found {found}, wanted shape {tuple(now.shape)} of {now.dtype}"
            )
    try:
        _restore(state)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"rng: found no state of a generator: {one_line(error)}") from error


def _restore(state: Mapping[str, Tensor]) -> None:
    version, *words = state["python"].tolist()
    has_gauss, gauss = state["python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))

    *keys, position = state["numpy"].tolist()
    has_gauss, gauss = state["numpy.gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, int(bool(has_gauss)), gauss)
    )

    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda.{index}"], index)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([value is not None, value or 0.0], dtype=torch.float64)
