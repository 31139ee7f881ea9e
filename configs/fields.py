"""The keys of a config and their types, read from the sources of the dataclasses.

To import the dataclasses is to import torch, for which a mistyped key should not have to wait.
"""

import ast
import dataclasses
import functools
import re
import sys
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pydantic

from longhaul.datamodules.files import untrusted

Fields = dict[str, Any]
"""The types of a dataclass's keys, by name, as a `Leaf`, or as the Fields of another dataclass."""


class Leaf(NamedTuple):
    """A type without keys of its own, which pydantic checks."""

    hint: Any

    @property
    def types(self) -> tuple[type, ...]:
        """The classes that a value may have; NoneType for null."""
        return types_of(self.hint)

    @property
    def is_text(self) -> bool:
        """Whether an unquoted value is text even where YAML reads a number."""
        return str in self.types and int not in self.types


class Entries(NamedTuple):
    """A mapping from names to objects of a dataclass, or a list of them."""

    fields: "Fields"
    """Of each entry."""
    is_list: bool


TEXTS = Leaf(list[str])
"""A list of text."""

KIND = Leaf("kind")
"""A kind of attention with its options, for which see `fields_of_kind`."""

KINDS = Leaf("kinds")
"""A mapping of layers to kinds of attention."""

_ENTRIES = re.compile(r"(dict\[str, |list\[)(\w+)\]")
_WRITTEN = {"AttentionConfig": KIND, "dict[str, AttentionConfig]": KINDS}


def types_of(hint: Any) -> tuple[type, ...]:
    """The classes that a value of a type may have, each once; list for any list."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return types_of(parts[0])
    if origin is typing.Literal:
        return tuple(dict.fromkeys(map(type, parts)))
    if origin in (typing.Union, types.UnionType):
        return tuple(dict.fromkeys(one for part in parts for one in types_of(part)))
    return (origin or hint,)


def entry_class(hint: Any) -> Any:
    """The dataclass of the entries of a mapping or list; None for other types."""
    part = next(reversed(typing.get_args(hint)), None)
    is_entry = typing.get_origin(hint) in (dict, list) and dataclasses.is_dataclass(part)
    return part if is_entry else None


def with_entries(cls: Any, values: dict[str, Any], path: str) -> dict[str, Any]:
    """The values of a dataclass's fields, in which mappings and lists have objects as entries.

    Raises:
        ValueError: an entry lacks a field. The message begins with its path.
    """

    def built(entry: Any, values: Any, path: str) -> Any:
        if dataclasses.is_dataclass(values):
            return values
        for field in dataclasses.fields(entry):
            if field.name not in values and field.default is dataclasses.MISSING:
                raise ValueError(f"{path}.{field.name}: missing, and it has no default")
        return entry(**values)

    found, hints = {}, typing.get_type_hints(cls)
    for name, value in values.items():
        entry = entry_class(hints.get(name))
        if entry is not None and isinstance(value, dict):
            value = {key: built(entry, one, f"{path}{name}.{key}") for key, one in value.items()}
        elif entry is not None and isinstance(value, list):
            value = [built(entry, one, f"{path}{name}.{n}") for n, one in enumerate(value)]
        found[name] = value
    return found


@functools.cache
def run_fields() -> Fields:
    """The keys of RunConfig and of the dataclasses below it."""
    return _fields_of(_root() / "configs" / "run_config.py", "RunConfig")


def fields_of_kind(kind: str) -> Fields:
    """The options of a kind of attention.

    Raises:
        ValueError: there is no such kind.
    """
    kinds = _kinds_in_sources()
    if kinds is None:
        from longhaul.modules.attention import attention_config

        return _fields_of_class(attention_config(kind))
    if kind not in kinds:
        raise ValueError(
            f"attention.kind: found {kind!r}, wanted one of {', '.join(sorted(kinds))}"
        )
    return _fields_of(*kinds[kind])


def known_kinds() -> list[str]:
    """The kinds there are, sorted."""
    kinds = _kinds_in_sources()
    if kinds is not None:
        return sorted(kinds)
    from longhaul.modules.attention import registered_variants

    return list(registered_variants())


def _root() -> Path:
    return Path(str(resources.files("longhaul.configs"))).parent


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _kinds_in_sources() -> dict[str, tuple[Path, str]] | None:
    """File and class of each kind; None once kinds are imported, or if only that can tell."""
    if "longhaul.modules.attention" in sys.modules:
        return None  # Code may have registered kinds that no file has.
    found: dict[str, tuple[Path, str]] = {}
    for file in sorted((_root() / "modules" / "attention").rglob("*.py")):
        try:
            statements = _tree(file).body
        except (SyntaxError, ValueError, OSError):
            return None
        for one in statements:
            for call in one.decorator_list if isinstance(one, ast.ClassDef) else []:
                if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "register"):
                    continue
                kind = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
                if not isinstance(kind, str) or kind in found:
                    return None
                assert isinstance(one, ast.ClassDef)
                found[kind] = file, one.name
    return found


def _is_dataclass(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _fields_of_class(cls: type[Any]) -> Fields:
    """The fields of a dataclass that is imported."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {
        name: _fields_of_class(hint) if _is_dataclass(hint) else Leaf(hint)
        for name, hint in found.items()
    }


def _fields_of(file: Path, name: str) -> Fields:
    """The fields of a dataclass, those of its base classes included."""
    found: Fields = {}
    definition = _definition(file, name)
    if definition is None:
        return found
    file, cls = definition
    for base in reversed(cls.bases):
        found |= _fields_of(file, ast.unparse(base))
    for line in cls.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            written = ast.unparse(line.annotation)
            if not written.startswith("ClassVar"):
                found[line.target.id] = _type(file, written)
    return found


def _type(file: Path, written: str) -> Leaf | Fields | Entries:
    if written in _WRITTEN:
        return _WRITTEN[written]
    entry = _ENTRIES.fullmatch(written)
    if entry is not None and _definition(file, entry[2]) is not None:
        return Entries(_fields_of(file, entry[2]), is_list=entry[1] == "list[")
    try:
        return Leaf(eval(written, {**vars(typing), **vars(untrusted), **_types_in(file)}))
    except NameError:
        return _fields_of(file, written)


def _types_in(file: Path) -> dict[str, Any]:
    """The types that a file gives a name to, such as `Share = Annotated[float, ...]`."""
    found: dict[str, Any] = {}
    for line in _tree(file).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.value).startswith("Annotated["):
            names = {**vars(typing), "Field": pydantic.Field}
            found[ast.unparse(line.targets[0])] = eval(ast.unparse(line.value), names)
    return found


def _definition(file: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """The class of this name in a file, or in the file of ours that it is imported from."""
    for line in _tree(file).body:
        if isinstance(line, ast.ClassDef) and line.name == name:
            return file, line
        if isinstance(line, ast.ImportFrom) and any(name == one.name for one in line.names):
            package, *parts = (line.module or "").split(".")
            if package == "longhaul":
                return _definition(_root().joinpath(*parts).with_suffix(".py"), name)
    return None
