"""Pretraining of language models with linear-cost attention at long context.

    model = longhaul.load("runs/demo")  # or a checkpoint, or a folder that `longhaul export` wrote
    logits = model(model.encode("def main("))  # (B, T, vocabulary)

`longhaul.kernels` has power attention, `longhaul.modules` the attention variants and the language
model, `longhaul.configs` the configs of runs, and `longhaul.pipeline` what the `longhaul` command
runs. They are imported when they are named: `import longhaul` alone costs nothing.
"""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.pipeline.runs.loaded_model import LoadedModel

__all__ = ["__version__", "load"]

__version__ = "0.1.0"  # pyproject.toml reads it here


def load(path: str | PathLike[str]) -> "LoadedModel":
    """The model of a run (its newest checkpoint), of one of its checkpoints, or of an export.

    Args:
        path: the folder of the run, of the checkpoint, or that `longhaul export` wrote.

    Returns:
        The model in evaluation mode with float32 weights, on the GPU if there is one, with its
        tokenizer. Called with token ids (B, T), it gives logits (B, T, vocabulary).

    Raises:
        ValueError: the folder is none of these, or the run has no checkpoint yet.
        OSError: a file is damaged or cannot be read.
    """
    # Here, because torch takes seconds to import.
    from longhaul.pipeline.runs.loaded_model import load_model

    return load_model(path)
