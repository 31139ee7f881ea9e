"""The configuration of a run: a validated tree of dataclasses from YAML and the command line."""

from longhaul.configs.loader import ConfigError, load_run_config, load_stored_config, to_yaml
from longhaul.configs.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_run_config", "load_stored_config", "to_yaml"]
