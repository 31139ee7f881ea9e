"""The state of every random number generator of one process, as tensors.

Tensors because a checkpoint holds nothing else that is binary: generators come back without
unpickling anything.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def capture_rng() -> dict[str, Tensor]:
    """State of Python's, NumPy's (global) and torch's generators, the latter on every CUDA device.

    Returns:
        CPU tensors: `python`, `numpy`, `torch`, and `cuda.N` for each visible device. The two
        `.gauss` entries hold (is there one, value) of the normal deviate that Python and NumPy
        keep back from each pair they draw.
    """
    version, words, spare = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise ValueError(
            f"numpy's global generator: found {numpy_state['bit_generator']}, wanted MT19937"
        )
    twister = numpy_state["state"]
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": _spare(spare),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"]], dtype=torch.int64),
        "numpy.gauss": _spare(numpy_state["gauss"] if numpy_state["has_gauss"] else None),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        for index, cuda_state in enumerate(torch.cuda.get_rng_state_all()):
            state[f"cuda.{index}"] = cuda_state
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Put back what `capture_rng` returned.

    A run may move to a machine with other devices: devices that the state does not know keep their
    own generator, and states of devices that are not here are ignored.
    """
    version, *words = state["python"].tolist()
    has_gauss, gauss = state["python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))

    *keys, position = state["numpy"].tolist()
    has_gauss, gauss = state["numpy.gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss)
    )

    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda.{index}"], index)


def _spare(value: float | None) -> Tensor:
    return torch.tensor([value is not None, value or 0.0], dtype=torch.float64)
