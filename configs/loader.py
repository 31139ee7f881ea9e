"""From YAML files and command-line values to a RunConfig and back, strict on names and types."""

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longhaul.configs.fields import with_entries
from longhaul.configs.values import (
    MOST_BYTES,
    ConfigError,
    check_plain,
    check_size,
    checked,
    read_values,
)
from longhaul.configs.yaml_text import parse_yaml
from longhaul.datamodules.files.untrusted import one_line, read_regular, shown

if TYPE_CHECKING:
    from longhaul.configs.run_config import RunConfig
    from longhaul.modules.attention import AttentionConfig

# Text that no reader of YAML takes for something else, of those of version 1.1, which have the
# words below, to those that read 1e3 as a number.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*([./][A-Za-z0-9_-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), *, kind: str | None = None
) -> "RunConfig":
    """The run that a YAML file and `key.sub=value` strings describe.

    Args:
        path: a file, or the name of a preset in this package, such as run/demo.yaml.
        overrides: values that win over those of the file.
        kind: replaces model.attention.kind; options that the new kind has are kept.

    Raises:
        ConfigError: one line with the key, the value found and the value wanted, and the file if
            the value is one of a file.
    """
    values = read_values(path, overrides, kind=kind)
    try:
        return _build(values.tree)
    except ConfigError as error:
        raise values.placed(error) from error


def load_stored_config(path: Path) -> "RunConfig":
    """The run that `to_yaml` has written to a file, perhaps on another machine.

    Nothing in it is resolved: neither files that it inherits nor interpolations, which would put
    this machine's environment into the config.

    Raises:
        ConfigError: one line with the file, the key, the value found and the value wanted.
    """
    try:
        values = parse_yaml(read_regular(path, MOST_BYTES))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {shown(values)}, wanted a mapping of keys")
    try:
        check_size(values)
        check_plain(values)
        return _build(checked(OmegaConf.create(values)))
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None


def to_yaml(config: "RunConfig") -> str:
    """The whole config, kinds included, as YAML. Loading it gives an equal config.

    Text that any reader could take for a number, a date or the like is in quotes.
    """
    return yaml.dump(
        to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 30
    )


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes, unless every reader of YAML takes it for text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts, with the `kind` of attention configs."""
    values: dict[str, Any] = {}
    if getattr(config, "kind", ""):  # of a kind of attention
        values["kind"] = config.kind
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict):
            value = {key: _plain(entry) for key, entry in value.items()}
        elif isinstance(value, list):
            value = [_plain(entry) for entry in value]
        values[field.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 64}} as {"model.width": 64}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _build(values: dict[str, Any]) -> "RunConfig":
    """The run of values whose keys and types are checked."""
    # Imported here, because they load torch: what is wrong with the values is said before.
    from longhaul.configs.run_config import RunConfig

    config = _built(RunConfig, values, "")
    assert isinstance(config, RunConfig)
    return config


def _built(cls: type[Any], values: dict[str, Any], path: str) -> Any:
    """An object of a dataclass, after those of the dataclasses below it."""
    from longhaul.modules.attention import AttentionConfig  # loads torch, as above

    is_kind = cls is AttentionConfig
    if is_kind:
        cls = _attention(values["kind"], path.removesuffix("."))
    hints, parts = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        key, hint = f"{path}{field.name}", hints[field.name]
        value = values.get(field.name, dataclasses.MISSING)
        if dataclasses.is_dataclass(hint):
            value = _built(hint, values.get(field.name, {}), f"{key}.")  # type: ignore[arg-type]
        elif hint == dict[str, AttentionConfig] and field.name in values:
            value = {
                name: _built(AttentionConfig, one, f"{key}.{name}.") for name, one in value.items()
            }
        defaults = (field.default, field.default_factory)
        has_default = any(one is not dataclasses.MISSING for one in defaults)
        if value == MISSING or (value is dataclasses.MISSING and not has_default):
            raise ConfigError(f"{key}: missing, and it has no default")
        if value is not dataclasses.MISSING:
            parts[field.name] = value
    try:
        return cls(**(parts if is_kind else with_entries(cls, parts, path)))
    except ValueError as error:
        # Only kinds do not know the path of their keys.
        raise ConfigError(f"{path if is_kind else ''}{error}") from error


def _attention(kind: str, path: str) -> "type[AttentionConfig]":
    from longhaul.modules.attention import attention_config  # loads torch, as above

    try:
        return attention_config(kind)
    except ValueError as error:
        raise ConfigError(f"{path}{str(error).removeprefix('attention')}") from error
