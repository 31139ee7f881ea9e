"""Imports the files of variants. One that is broken does not take the other kinds along."""

import importlib
import pkgutil
import traceback
from collections.abc import Iterable
from pathlib import Path

from longhaul.modules.attention import base


def import_variants(package: str, folders: Iterable[str]) -> None:
    """Import every module of a package, in folders too; a warning names those that cannot run.

    A file that is half written must not end, or keep from being resumed, runs of other kinds.
    """
    for module in pkgutil.iter_modules(folders, f"{package}."):
        try:
            imported = importlib.import_module(module.name)
            if module.ispkg:
                import_variants(module.name, imported.__path__)
        except Exception as error:  # The file may do anything.
            file = Path(module.module_finder.path, f"{module.name.rpartition('.')[2]}.py")  # type: ignore[union-attr]
            base.skip_module(_explained(error, file))


def _explained(error: Exception, file: Path) -> str:
    """Place of an error, in the file or in another of its folder, and what is wrong; one line."""
    place, told = str(file), str(error)
    calls = traceback.extract_tb(error.__traceback__)
    own = [f"{one.filename}:{one.lineno}" for one in calls if _is_variant(one.filename, file)]
    if own:
        place = own[-1]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, told = f"{error.filename}:{error.lineno}", error.msg
    return f"{place}: {type(error).__name__}: {' '.join(told.split())}"


def _is_variant(name: str, beside: Path) -> bool:
    """Whether a stack frame is in a variant's file: one in base.py does not show the mistake."""
    return beside.parent in Path(name).parents and name not in (base.__file__, __file__)
