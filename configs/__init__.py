"""The configuration of a run: a validated tree of dataclasses from YAML and the command line."""

from typing import TYPE_CHECKING, Any

from longhaul.configs.loader import load_run_config, load_stored_config, to_yaml
from longhaul.configs.values import ConfigError

if TYPE_CHECKING:
    from longhaul.configs.run_config import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_run_config", "load_stored_config", "to_yaml"]


def __getattr__(name: str) -> Any:
    """Import RunConfig when it is first used: it loads torch, for which refusals cannot wait."""
    if name == "RunConfig":
        from longhaul.configs.run_config import RunConfig

        return RunConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
