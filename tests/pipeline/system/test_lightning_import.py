"""Lightning is imported without what torchmetrics imports for figures, text and sound."""

import subprocess
import sys

import pytest

TRY = """
import importlib.util, sys
import longhaul.pipeline.commands.train
from longhaul.pipeline.system.lightning_import import import_lightning
assert "lightning" not in sys.modules
import_lightning()
import longhaul.pipeline.training.run
print(*(name for name in ("matplotlib", "scipy", "transformers") if name in sys.modules))
assert importlib.util.find_spec("scipy") is not None
import lightning.pytorch, scipy.signal, torchmetrics
"""


@pytest.mark.wide
def test_what_no_run_uses_is_not_imported_and_can_be_later() -> None:
    result = subprocess.run(
        [sys.executable, "-c", TRY], env={"PATH": ""}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "\n"), result.stderr
