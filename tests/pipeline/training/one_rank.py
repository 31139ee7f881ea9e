"""One rank of several trainings in a row, without the imports again each time.

Not a test; tests start one process a rank. Arguments: a file with a JSON list of runs, each the
arguments of `longhaul train`. In each run's folder `rank-N.json` tells what this rank held.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer


def _bytes(tensor: torch.Tensor) -> int:
    """Of this rank's part, as FSDP2 or ZeRO 3 leaves it between updates."""
    part: Any = getattr(tensor, "ds_tensor", tensor)
    part = part.to_local() if hasattr(part, "to_local") else part
    return int(part.numel() * part.element_size())


def _report(trainer: Trainer, module: LightningModule) -> dict[str, int]:
    optimizer: Any = trainer.optimizers[0]
    inner = getattr(optimizer, "optimizer", optimizer)  # ZeRO's holds the real one
    moments = [v for state in inner.state.values() for v in state.values() if v.ndim]
    return {
        "parameters": sum(map(_bytes, module.parameters())),
        "moments": sum(map(_bytes, moments)),
    }


def main() -> None:
    from longhaul.pipeline.runs.folder import load_run
    from longhaul.pipeline.training import callback
    from longhaul.pipeline.training import run as train

    # All runs of this process share a connection.
    train.disconnect_ranks = lambda: None  # type: ignore[attr-defined]
    rank = int(os.environ["LOCAL_RANK"])
    original = callback.TrainingCallback.on_fit_end

    def on_fit_end(self: Any, trainer: Trainer, module: LightningModule) -> None:
        folder = Path(self.config.root) / self.config.name
        (folder / f"rank-{rank}.json").write_text(json.dumps(_report(trainer, module)))
        original(self, trainer, module)

    callback.TrainingCallback.on_fit_end = on_fit_end  # type: ignore[method-assign]
    for config, *overrides in json.loads(Path(sys.argv[1]).read_text()):
        status = train.train(load_run(config, overrides))
        assert status == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
