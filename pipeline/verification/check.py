"""What a check is: a function, its time limit, and what the machine must have for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from longhaul.pipeline.verification.machine import Machine


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: str  # "cuda" or "cpu"
    scratch: Path  # a folder that is removed when the command ends


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a machine must have for a check to run."""

    gpu: bool = False
    packages: tuple[str, ...] = ()  # the names that Python imports
    programs: tuple[str, ...] = ()

    def unmet(self, machine: Machine) -> str | None:
        """What is missing, in words; None if nothing is."""
        if self.gpu and machine.device != "cuda":
            return "needs a GPU"
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            return f"needs packages that are not installed: {', '.join(missing)}"
        missing = [name for name in self.programs if which(name) is None]
        return f"needs a program that is not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, or one measurement, that runs in a process of its own."""

    part: str  # "kernels", "trainer" or "timings"
    name: str
    function: Callable[[Any, Place], dict[str, Any]]
    """Importable by name. Its result is JSON; what stands under "faults" is wrong."""

    argument: Any
    seconds: float
    """Its time limit, with what its process imports and compiles."""

    is_alone: bool = True
    """Whether nothing else may run beside it."""

    gigabytes: float = 0.0
    """How much memory of a GPU it takes, about."""

    needs: Needs = field(default_factory=Needs)
    is_ours: bool = True
    """False for other projects' kernels: that they do not run here is no failure."""

    @property
    def key(self) -> str:
        return f"{self.part}: {self.name}"
