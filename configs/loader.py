"""From YAML files and command-line values to a RunConfig and back, strict on names and types."""

import dataclasses
import difflib
import io
import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from longhaul.configs.presets import find_preset, nearest_preset
from longhaul.configs.schema import RunConfig
from longhaul.datamodules.untrusted import one_line, read_regular, shown
from longhaul.modules.attention import AttentionConfig, attention_config, registered_variants

_MOST_STORED_BYTES = 1 << 20
_MOST_STORED_VALUES = 100_000
_MOST_DEPTH = 20
_LARGEST_NUMBER = 1 << 62


class ConfigError(ValueError):
    """A config with an unknown key, a wrong type, or values that cannot be run."""


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), *, kind: str | None = None
) -> RunConfig:
    """The run that a YAML file and `key.sub=value` strings describe.

    Args:
        path: a file, or the name of a preset in this package, such as run/demo.yaml.
        overrides: values that win over those of the file.
        kind: replaces model.attention.kind; options that the new kind has are kept.

    Raises:
        ConfigError: one line with the key, the value found and the value wanted.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"command line: found {override!r}, wanted key.sub=value")
    try:
        command_line = OmegaConf.from_dotlist(list(map(_as_text, overrides)))
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {one_line(error)}") from error
    try:
        merged = _merge(_read(_find(path)), command_line)
        if kind is not None:
            merged = _merge(merged, OmegaConf.create({"model": {"attention": {"kind": kind}}}))
        return _build(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def load_stored_config(path: Path) -> RunConfig:
    """The run that `to_yaml` has written to a file, perhaps on another machine.

    Nothing in it is resolved: neither files that it inherits nor interpolations, which would put
    this machine's environment into the config.

    Raises:
        ConfigError: one line with the file, the key, the value found and the value wanted.
    """
    try:
        values = yaml.safe_load(read_regular(path, _MOST_STORED_BYTES))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {shown(values)}, wanted a mapping of keys")
    try:
        _check_size(values)
        for key, value in _leaves(values):
            if isinstance(value, str) and "${" in value:
                raise ConfigError(f"{key}: found {shown(value)}, wanted a plain value")
        return _build(OmegaConf.create(values))
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None


def _check_size(values: Any) -> None:
    """Raise ConfigError if there are too many values.

    An alias stands for a value that is written once, but is built at each place.
    """
    if any(count > _MOST_STORED_VALUES for count, _ in enumerate(_leaves(values))):
        raise ConfigError(f"found more than {_MOST_STORED_VALUES} values")


def _leaves(values: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All keys, and all values that are not made of others, with their dotted paths."""
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{prefix[:60]}: found deeper nesting than {_MOST_DEPTH}")
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path, key
            yield from _leaves(value, path, depth + 1)
    else:
        yield prefix, values


def to_yaml(config: RunConfig) -> str:
    """The whole config, kinds included, as YAML. Loading it gives an equal config."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts, with the `kind` of attention configs."""
    values: dict[str, Any] = {}
    if isinstance(config, AttentionConfig):
        values["kind"] = config.kind
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, dict):
            value = {key: to_dict(entry) for key, entry in value.items()}
        values[field.name] = value
    return values


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 64}} as {"model.width": 64}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _as_text(override: str) -> str:
    """Quote the value of a text field, because YAML would read 12:30 as a number and 010 as 8."""
    key, _, value = override.partition("=")
    wanted: Any = RunConfig
    for part in key.split("."):
        hints = typing.get_type_hints(wanted) if dataclasses.is_dataclass(wanted) else {}
        wanted = hints.get(part)
    is_text = wanted is str or (wanted == str | None and value != "null")
    is_quoted = value[:1] in ("'", '"')
    return f"{key}={json.dumps(value)}" if is_text and not is_quoted else override


def _find(path: str | Path) -> Path:
    """The file itself if it exists, else the preset of that name."""
    path = Path(path)
    if path.is_file():
        return path
    if (preset := find_preset(path)) is not None:
        return preset
    if path.is_dir():
        raise ConfigError(f"config: found the folder {path}, wanted a YAML file")
    if "=" in str(path):
        raise ConfigError(
            f"config: found {str(path)!r}, wanted a YAML file or a preset before it, such as "
            "run/demo.yaml"
        )
    near = nearest_preset(str(path))
    wanted = "wanted a YAML file" if near is None else f"the nearest preset is {near}"
    raise ConfigError(f"config: found no file {path} and no such preset, {wanted}")


def _read(path: Path, below: tuple[Path, ...] = ()) -> DictConfig:
    """The file merged over the files it inherits, in order; their paths are relative to it."""
    if path.resolve() in below:
        raise ConfigError(f"{path}: inherits itself")
    raw = _load(path)
    parents = raw.pop("inherits", ListConfig([]))
    if not isinstance(parents, ListConfig) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(f"{path}: inherits: wanted a list of file names")
    merged = OmegaConf.create({})
    for parent in parents:
        file = path.parent / parent
        try:
            file = file if file.is_file() else _find(parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: inherits: {str(error).removeprefix('config: ')}") from None
        merged = _merge(merged, _read(file, (*below, path.resolve())))
    return _merge(merged, raw)


def _load(path: Path) -> DictConfig:
    """The mapping in a YAML file."""
    try:
        text = read_regular(path, _MOST_STORED_BYTES).decode()
        _check_size(yaml.safe_load(text))
        raw = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error
    if not isinstance(raw, DictConfig) or ":" not in text:  # OmegaConf makes a key of a lone text
        found = shown(text.strip()) if text.strip() else "nothing"
        raise ConfigError(f"{path}: found {found}, wanted a mapping of keys, such as `name: a`")
    return raw


def _merge(lower: DictConfig, upper: DictConfig) -> DictConfig:
    """`upper` over `lower`. If upper changes a kind, options that the new kind has are kept."""
    old, new = _attentions(lower), _attentions(upper)
    for path in old.keys() & new.keys():
        kind = new[path].get("kind")
        if kind is not None and kind != old[path].get("kind"):
            known = {field.name for field in dataclasses.fields(_attention(kind, path))}
            for option in [option for option in old[path] if option not in known]:
                del old[path][option]
    _check_mappings(OmegaConf.to_container(lower), OmegaConf.to_container(upper))
    merged = OmegaConf.merge(lower, upper)
    assert isinstance(merged, DictConfig)
    return merged


def _attentions(tree: Any) -> dict[str, Any]:
    """Every mapping of attention options in an unchecked tree, by its dotted path."""
    mapping = (dict, DictConfig)
    model = tree.get("model")
    found: dict[str, Any] = {}
    if not isinstance(model, mapping):
        return found
    if isinstance(model.get("attention"), mapping):
        found["model.attention"] = model["attention"]
    layers: Any = model.get("layer_attention")
    entries: dict[Any, Any] = dict(layers.items()) if isinstance(layers, mapping) else {}
    for key, options in entries.items():
        if not isinstance(key, str):
            # YAML reads 1:30 as the number 90, so keys must be text.
            raise ConfigError(
                f"model.layer_attention: found the number {key} as a key, wanted text in quotes, "
                'such as "0" or "::2"'
            )
        if isinstance(options, mapping):
            found[f"model.layer_attention.{key}"] = options
    return found


def _check_mappings(lower: Any, upper: Any, prefix: str = "") -> None:
    """Raise where another value replaces a mapping; OmegaConf's merge would ignore it or crash."""
    for key, value in upper.items():
        if isinstance(lower.get(key), dict):
            _check_mappings(lower[key], _mapping(value, f"{prefix}{key}"), f"{prefix}{key}.")


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {json.dumps(value)}")
    return value


def _attention(kind: object, path: str) -> type[AttentionConfig]:
    if not isinstance(kind, str):
        raise ConfigError(f"{path}.kind: expected str, got {kind}")
    try:
        return attention_config(kind)
    except ValueError as error:
        raise ConfigError(f"{path}{str(error).removeprefix('attention')}") from error


def _build(raw: DictConfig) -> RunConfig:
    try:
        values: dict[str, Any] = OmegaConf.to_container(raw, resolve=True)  # type: ignore[assignment]
        variants: dict[str, type[AttentionConfig]] = {}
        for path, options in ({"model.attention": {}} | _attentions(values)).items():
            if "kind" not in options:
                kinds = ", ".join(registered_variants())
                raise ConfigError(f"{path}.kind: missing, wanted one of {kinds}")
            variants[path] = _attention(options.pop("kind"), path)
        _check(values, RunConfig, variants)
        tree = OmegaConf.merge(OmegaConf.structured(RunConfig), _typed(values, variants), values)
        for path, options in _attentions(tree).items():
            try:
                OmegaConf.to_object(options)
            except ValueError as error:
                raise ConfigError(f"{path}.{error}") from error
        config = OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: missing, and it has no default") from error
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {first}" if error.full_key else first) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, RunConfig)
    return config


def _typed(
    values: dict[str, Any], variants: dict[str, type[AttentionConfig]]
) -> dict[str, dict[str, Any]]:
    """The part of the tree whose dataclasses depend on the kinds."""
    structured = {path: OmegaConf.structured(variant) for path, variant in variants.items()}
    layers = values["model"].get("layer_attention", {})
    return {
        "model": {
            "attention": structured["model.attention"],
            "layer_attention": {key: structured[f"model.layer_attention.{key}"] for key in layers},
        }
    }


def _check(
    values: dict[str, Any], cls: type[Any], variants: dict[str, type[Any]], prefix: str = ""
) -> None:
    """Raise at unknown keys, with the nearest known one, and at values of a wrong type.

    Whole numbers such as 1e6 become integers where one is wanted. OmegaConf would find unknown keys
    late, without a suggestion, and accept "2" for 2. Numbers that 64 bits do not hold are refused
    here, before any other check computes with them.
    """
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            all_known = f"wanted one of {', '.join(known)}" if known else f"{prefix[:-1]} has none"
            hint = f"the nearest known one is {prefix}{near[0]}" if near else all_known
            raise ConfigError(f"{path}: unknown key, {hint}")
        nested = variants.get(path, hints[key])
        if dataclasses.is_dataclass(nested):
            _check(_mapping(value, path), nested, variants, f"{path}.")  # type: ignore[arg-type]
            continue
        if typing.get_origin(nested) is dict:
            for name, entry in _mapping(value, path).items():
                below = f"{path}.{name}"
                _check(_mapping(entry, below), variants[below], variants, f"{below}.")
            continue
        if typing.get_origin(nested) is list:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ConfigError(f"{path}: expected a list of str, got {json.dumps(value)}")
            continue
        wanted = typing.get_args(nested) or (nested,)
        found_text = isinstance(value, str) and str not in wanted and value != MISSING
        found_mapping = isinstance(value, dict | list)
        if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
            raise ConfigError(f"{path}: found {shown(value)}, wanted a finite number, at most 2^62")
        if isinstance(value, float) and float not in wanted and value.is_integer():
            # YAML reads 1e6 as a number with a fraction.
            values[key] = value = int(value)
        found_fraction = isinstance(value, float) and float not in wanted
        if (
            found_text
            or found_mapping
            or found_fraction
            or (isinstance(value, bool) and bool not in wanted)
        ):
            names = " or ".join("null" if t is type(None) else t.__name__ for t in wanted)
            raise ConfigError(f"{path}: expected {names}, got {json.dumps(value)}")
