"""Imports Lightning for a training process, in less than half of the time."""

import importlib
import importlib.metadata as metadata
import importlib.util
from importlib.machinery import ModuleSpec

# torchmetrics, which Lightning imports, imports each of these that is installed, for figures and
# for metrics of text and sound, which nothing of ours uses.
_UNUSED = ("matplotlib", "scipy", "transformers")


def import_lightning() -> None:
    """Import Lightning as if these packages were missing: they take most of its time.

    Whoever imports one of them later finds it. What asks lightning_utilities whether it is
    installed, as torchmetrics does, is told for as long as the process lives that it is not. No
    other thread may import anything meanwhile.
    """
    version, find_spec = metadata.version, importlib.util.find_spec

    def version_of_used(distribution_name: str) -> str:
        if distribution_name in _UNUSED:
            raise metadata.PackageNotFoundError(distribution_name)
        return version(distribution_name)

    def find_used(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in _UNUSED else find_spec(name, package)

    metadata.version, importlib.util.find_spec = version_of_used, find_used
    try:
        importlib.import_module("lightning.pytorch")
    finally:
        metadata.version, importlib.util.find_spec = version, find_spec
