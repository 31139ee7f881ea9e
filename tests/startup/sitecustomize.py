"""Python runs this at the start of every process that tests start, before anything else.

torchmetrics imports these for metrics that nothing here uses, if they are there: a third of what it
takes a rank to start, and tests start hundreds. Who just imports them finds them as ever.
"""

import importlib.metadata as metadata
import importlib.util
import os
from importlib.machinery import ModuleSpec

_UNUSED = ("transformers", "scipy", "matplotlib")
_version, _find_spec = metadata.version, importlib.util.find_spec


def version(name: str) -> str:
    if name in _UNUSED:
        raise metadata.PackageNotFoundError(name)
    return _version(name)


def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name in _UNUSED else _find_spec(name, package)


metadata.version, importlib.util.find_spec = version, find_spec
exec(os.environ.get("LONGHAUL_TEST_FAULT", ""))
