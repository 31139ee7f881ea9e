"""From YAML files and command-line values to the checked keys and types of a run, without torch.

What is typed for a key that is text stays text, such as 1e3, 010, 12:30 or no: the types of keys
decide what a value is, before YAML does.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longhaul.configs.counts import with_unit
from longhaul.configs.fields import (
    KIND,
    KINDS,
    TEXTS,
    Entries,
    Fields,
    Leaf,
    fields_of_kind,
    known_kinds,
    run_fields,
    with_entries,
)
from longhaul.configs.presets import find_preset, nearest_preset, preset_name
from longhaul.configs.run_folders import has_run, run_folder_of
from longhaul.configs.schema import (
    CheckpointConfig,
    EvaluationConfig,
    SlurmConfig,
    TrackingConfig,
    TrainerConfig,
)
from longhaul.configs.yaml_text import MOST_VALUES, Loader
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.files.untrusted import checked_value, one_line, read_regular, shown
from longhaul.datamodules.urls import SQLITE, at_home, begun_at

_LARGEST_NUMBER = 1 << 62
MOST_BYTES = 1 << 20
"""Of a config's file."""
_MOST_DEPTH = 20
# The parts that can be built without torch.
_PARTS: dict[str, Callable[..., object]] = {
    "data": DataConfig,
    "trainer": TrainerConfig,
    "checkpoint": CheckpointConfig,
    "evaluation": EvaluationConfig,
    "tracking": TrackingConfig,
    "slurm": SlurmConfig,
}
_PATHS = {
    *("root", "data.manifest", "data.validation_manifest", "data.cache_dir"),
    *("trainer.start_from", "trainer.branch_from", "tracking.uri"),
    *("slurm.container", "slurm.container_mounts"),
}
# Of these, the ones that begin at the folder of a run in the config there.
_PATHS_OF_RUN = {
    *("data.manifest", "data.validation_manifest"),
    *("trainer.start_from", "trainer.branch_from", "tracking.uri"),
}
_PATH_OF_SOURCE = re.compile(r"data\.sources\..*\.(validation_)?manifest")


class ConfigError(ValueError):
    """A config with an unknown key, a wrong type, or values that cannot be run."""


class Source(NamedTuple):
    """The values of one file, or those of the command line."""

    file: Path | None
    values: DictConfig


class Values(NamedTuple):
    """The values of a run, and where they were found, the strongest source last."""

    tree: dict[str, Any]
    sources: Sequence[Source]

    def placed(self, error: Exception) -> ConfigError:
        """The error, prefixed with the file that sets the key it names."""
        return _placed(error, self.sources)


def read_values(
    path: str | Path, overrides: Sequence[str] = (), *, kind: str | None = None
) -> Values:
    """The values that a YAML file and `key.sub=value` strings describe; see `load_run_config`.

    All is checked that can be without torch: keys, types, and the parts but `model` and `optim`.

    Raises:
        ConfigError: one line with the key, the value found and the value wanted.
    """
    command_line = _command_line(overrides)
    sources: list[Source] = []
    try:
        merged = _read(_find(path), sources)
        sources.append(Source(None, command_line))
        merged = _merge(merged, command_line)
        if kind is not None:
            merged = _merge(merged, OmegaConf.create({"model": {"attention": {"kind": kind}}}))
        return Values(checked(merged), sources)
    except ConfigError as error:
        raise _placed(error, sources) from None
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        found = ConfigError(f"{error.full_key}: {first}" if error.full_key else first)
        raise _placed(found, sources) from None


def checked(raw: DictConfig) -> dict[str, Any]:
    """The values as plain objects, after a check of their keys and types."""
    values: dict[str, Any] = OmegaConf.to_container(raw, resolve=True)  # type: ignore[assignment]
    for path, options in ({"model.attention": {}} | attentions(values)).items():
        if "kind" not in options:
            raise ConfigError(f"{path}.kind: missing, wanted one of {', '.join(known_kinds())}")
    _check(values, run_fields(), "")
    for name, build in _PARTS.items():
        try:
            given = {k: v for k, v in values.get(name, {}).items() if v != MISSING}
            build(**with_entries(build, given, f"{name}."))
        except TypeError:
            pass  # A key without a default is missing, which is found when all is built.
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return values


def _parsed(text: str, wanted: Any) -> Any:
    """The value of YAML text. What is written plain where text is wanted is text."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_texts(node, wanted)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _keep_texts(node: yaml.Node, wanted: Any) -> None:
    for count, (one, fields) in enumerate(_below_node(node, wanted)):
        if count > MOST_VALUES:
            raise ConfigError(f"found more than {MOST_VALUES} values")
        if isinstance(fields, Leaf) and fields.is_text and _is_plain(one):
            one.tag = "tag:yaml.org,2002:str"


def _below_node(node: yaml.Node, wanted: Any) -> Iterator[tuple[yaml.Node, Any]]:
    """The node and those in it, each with what is wanted there, as far as anything is.

    A node with aliases is visited at each place.
    """
    yield node, wanted
    if isinstance(node, yaml.MappingNode):
        options: Any = wanted
        if wanted is KIND:
            kind = [value.value for key, value in node.value if key.value == "kind"]
            options = _options(kind[0]) if kind and isinstance(kind[0], str) else {}
        below = [
            (value, KIND if wanted is KINDS else _below(options, key.value))
            for key, value in node.value
        ]
    elif isinstance(node, yaml.SequenceNode) and _is_list(wanted):
        below = [(one, Leaf(str)) for one in node.value]
    elif isinstance(node, yaml.SequenceNode) and isinstance(wanted, Entries):
        below = [(one, wanted.fields) for one in node.value]
    else:
        below = []
    for one, fields in below:
        if fields is not None:
            yield from _below_node(one, fields)


def _is_list(wanted: Any) -> bool:
    return isinstance(wanted, Leaf) and wanted.hint == list[str]


def _is_plain(node: yaml.Node) -> bool:
    """Whether the node is something else than text only because it is written without quotes."""
    others = ("int", "float", "bool", "merge")
    return getattr(node, "style", "") is None and node.tag.rpartition(":")[2] in others


def _options(kind: str) -> Fields:
    """The options of a kind, and `kind`; none if there is no such kind, which is refused later."""
    try:
        return {**fields_of_kind(kind), "kind": Leaf(str)}
    except ValueError:
        return {}


def _below(fields: Any, key: Any) -> Any:
    if isinstance(fields, Entries):
        return None if fields.is_list else fields.fields
    is_named = isinstance(fields, dict) and isinstance(key, str)
    return fields.get(key) if is_named else None


def _command_line(overrides: Sequence[str]) -> DictConfig:
    """The values of `key.sub=value` strings."""
    values = OmegaConf.create({})
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise ConfigError(f"command line: found {override!r}, wanted key.sub=value")
        wanted: Any = run_fields()
        for part in key.split("."):
            wanted = KIND if wanted is KINDS else _below(wanted, part)
        is_text = isinstance(wanted, Leaf) and wanted.is_text and text[:1] not in ("'", '"')
        try:
            value: Any = text
            if not is_text:
                value = _parsed(text, wanted)
            elif text == "null" and type(None) in wanted.types:
                value = None
            if value == {} and (isinstance(wanted, dict) or wanted is KINDS):
                raise ConfigError(f"{key}: found {{}}, which changes nothing, wanted {key}.KEY=...")
            OmegaConf.update(values, key, value)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"command line: {one_line(error)}") from None
    return values


def typed_keys(overrides: Sequence[str]) -> set[str]:
    """The keys to which `key.sub=value` strings give values, and those above them."""
    return {key for key, _ in leaves(OmegaConf.to_container(_command_line(overrides)))}


def _placed(error: Exception, sources: Sequence[Source]) -> ConfigError:
    key = re.match(r"([\w.:-]+?)(?: and [\w.]+)?: ", str(error))
    for file, values in reversed(sources) if key is not None else ():
        found: Any = OmegaConf.to_container(values)
        for part in key[1].split("."):  # type: ignore[index]
            found = found.get(part, MISSING) if isinstance(found, dict) else MISSING
        if found != MISSING:
            return ConfigError(str(error) if file is None else f"{preset_name(file)}: {error}")
    return ConfigError(str(error))


def _find(path: str | Path) -> Path:
    """The file itself if it exists, else the preset of that name."""
    path = Path(os.path.expanduser(path))
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


def _read(path: Path, sources: list[Source], below: tuple[Path, ...] = ()) -> DictConfig:
    """The file merged over the files it inherits, in order; their names are relative to it.

    Paths in a file begin at the working folder, and those in the config of a run at its folder.
    In the folder of a run nothing of this machine is put into it, neither its environment nor
    other files.
    """
    if path.resolve() in below:
        raise ConfigError(f"{path}: inherits itself")
    raw = _load(path)
    if below and path.name == "config.yaml" and has_run(path.parent):
        _begin_at(path.parent, raw)
    is_foreign = not below and run_folder_of(path) is not None
    if is_foreign:
        try:
            check_plain(OmegaConf.to_container(raw))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    parents = raw.pop("inherits", ListConfig([]))
    if not isinstance(parents, ListConfig) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(f"{path}: inherits: wanted a list of file names")
    merged = OmegaConf.create({})
    for parent in parents:
        file = path.parent / os.path.expanduser(parent)
        if is_foreign and (file.is_file() or find_preset(Path(parent)) is None):
            raise ConfigError(
                f"{path}: inherits: found {shown(parent)} in the folder of a run, which someone "
                "else may have made, wanted only presets of longhaul; if it is yours, move it"
            )
        try:
            file = file if file.is_file() else _find(parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: inherits: {str(error).removeprefix('config: ')}") from None
        merged = _merge(merged, _read(file, sources, (*below, path.resolve())))
    sources.append(Source(path, raw))
    return _merge(merged, raw)


def _begin_at(folder: Path, values: DictConfig) -> None:
    """Let the paths in the config of a run begin at its folder (RunFolder.record_start)."""
    for key, value in dict(leaves(OmegaConf.to_container(values))).items():  # a value over its key
        if isinstance(value, str) and (key in _PATHS_OF_RUN or _PATH_OF_SOURCE.fullmatch(key)):
            is_local = key != "tracking.uri" or value.startswith(SQLITE)
            OmegaConf.update(values, key, begun_at(folder, value) if is_local else value)


def _load(path: Path) -> DictConfig:
    """The mapping in a YAML file."""
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8-sig")
        raw = _parsed(text, {**run_fields(), "inherits": TEXTS})
        check_size(raw)
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error).removeprefix(f'{path}: ')}") from error
    if not isinstance(raw, dict):
        found = shown(text.strip()) if text.strip() else "nothing"
        raise ConfigError(f"{path}: found {found}, wanted a mapping of keys, such as `name: a`")
    return OmegaConf.create(raw)


def check_size(values: Any) -> None:
    """Raise ConfigError if there are too many values.

    An alias stands for a value that is written once, but is built at each place.
    """
    if any(count > MOST_VALUES for count, _ in enumerate(leaves(values))):
        raise ConfigError(f"found more than {MOST_VALUES} values")


def check_plain(values: Any) -> None:
    """Raise ConfigError at a value that would be replaced, as by an environment variable."""
    for key, value in leaves(values):
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{key}: found {shown(value)}, wanted a plain value")


def leaves(values: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All keys, and all values that are not made of others, with their dotted paths."""
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{prefix[:60]}: found deeper nesting than {_MOST_DEPTH}")
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path, key
            yield from leaves(value, path, depth + 1)
    else:
        yield prefix, values


def _merge(lower: DictConfig, upper: DictConfig) -> DictConfig:
    """`upper` over `lower`. If upper changes a kind, options that the new kind has are kept."""
    old, new = attentions(lower), attentions(upper)
    for path in old.keys() & new.keys():
        kind = new[path].get("kind")
        if kind is not None and kind != old[path].get("kind"):
            known = _kind_fields(kind, path)
            for option in [one for one in old[path] if one not in known]:
                del old[path][option]
    _check_mappings(OmegaConf.to_container(lower), OmegaConf.to_container(upper))
    merged = OmegaConf.merge(lower, upper)
    assert isinstance(merged, DictConfig)
    return merged


def attentions(tree: Any) -> dict[str, Any]:
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
            if value == {} and lower[key]:
                raise ConfigError(f"{prefix}{key}: found {{}}, which changes nothing, wanted keys")
            _check_mappings(lower[key], _mapping(value, f"{prefix}{key}"), f"{prefix}{key}.")


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {_json(value)}")
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _kind_fields(kind: object, path: str) -> Fields:
    if not isinstance(kind, str):
        raise ConfigError(f"{path}.kind: expected str, got {kind}")
    try:
        return fields_of_kind(kind)
    except ValueError as error:
        raise ConfigError(f"{path}{str(error).removeprefix('attention')}") from error


def _check(values: dict[str, Any], fields: Fields, prefix: str) -> None:
    """Raise at unknown keys, with the nearest known one, and at values of a wrong type.

    Whole numbers such as 1e6 and 10B become integers where one is wanted, and ~ in paths the home
    folder. OmegaConf would find unknown keys late, without a suggestion, and accept "2" for 2.
    Numbers that 64 bits do not hold are refused here, before any other check computes with them.
    """
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in fields:
            known = list(fields)
            near = difflib.get_close_matches(str(key), known, n=1)
            all_known = f"wanted one of {', '.join(known)}" if known else f"{prefix[:-1]} has none"
            hint = f"the nearest known one is {prefix}{near[0]}" if near else all_known
            raise ConfigError(f"{path}: unknown key, {hint}")
        wanted = fields[key]
        if isinstance(wanted, dict):
            _check(_mapping(value, path), wanted, f"{path}.")
        elif isinstance(wanted, Entries):
            for name, entry in _entries(value, wanted, path):
                _check(_mapping(entry, f"{path}.{name}"), wanted.fields, f"{path}.{name}.")
        elif wanted is KIND:
            _check_kind(value, path)
        elif wanted is KINDS:
            for name, entry in _mapping(value, path).items():
                _check_kind(entry, f"{path}.{name}")
        else:
            values[key] = _checked_value(value, wanted, path)


def _entries(value: Any, wanted: Entries, path: str) -> Iterator[tuple[Any, Any]]:
    if not wanted.is_list:
        yield from _mapping(value, path).items()
        return
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected a list of mappings, got {_json(value)}")
    yield from enumerate(value)


def _check_kind(options: Any, path: str) -> None:
    options = _mapping(options, path)
    fields = _kind_fields(options.get("kind"), path)
    _check(options, {**fields, "kind": Leaf(str)}, f"{path}.")


def _checked_value(value: Any, wanted: Leaf, path: str) -> Any:
    texts = value if isinstance(value, list) else [value]
    if isinstance(value, str) and int in wanted.types:
        count = with_unit(value, path)
        value = value if count is None else count
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ConfigError(f"{path}: found {shown(value)}, wanted a finite number, at most 2^62")
    if isinstance(value, float) and float not in wanted.types and value.is_integer():
        value = int(value)  # YAML reads 1e6 as a number with a fraction.
    if value == MISSING:
        return value
    try:
        value = checked_value(wanted.hint, value, path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for text in texts:
        if isinstance(text, str):
            _check_text(text, path)
    is_path = path in _PATHS or _PATH_OF_SOURCE.fullmatch(path) is not None
    if is_path and value is not None:
        return [at_home(one) for one in value] if isinstance(value, list) else at_home(value)
    return value


def _check_text(text: str, path: str) -> None:
    if "${" in text:  # It would be resolved when the config is read again.
        raise ConfigError(f"{path}: found {shown(text)}, wanted text without ${{")
