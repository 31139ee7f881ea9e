"""Every key of a config with its type, default and meaning, read from the dataclasses."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from longhaul.configs.fields import entry_class, types_of
from longhaul.configs.run_config import RunConfig
from longhaul.modules.attention import (
    AttentionConfig,
    attention_config,
    registered_variants,
)


class Key(NamedTuple):
    """One key of a config."""

    name: str
    """Dotted path, or in the section of a kind the option's name."""
    type: str
    default: str
    """As in YAML; "required" if there is none."""
    meaning: str


class Section(NamedTuple):
    """The keys of one dataclass."""

    title: str
    """What the names of its keys begin with, or a kind; empty for the run itself."""
    meaning: str
    keys: tuple[Key, ...]


def sections() -> list[Section]:
    """The run's own keys, and those of each of its parts; kinds have sections of their own."""
    return list(_sections("", RunConfig))


def kind_section(kind: str) -> Section:
    """The options of a kind; those that have keys of their own are `parts_of_kinds`."""
    cls = attention_config(kind)
    return Section(kind, _first_paragraph(cls), _keys("", cls, has_parts=True))


def parts_of_kinds() -> list[Section]:
    """The keys of options that are mappings, each option once, whatever kinds have it."""
    parts = {
        section.title: section
        for kind in registered_variants()
        for section in list(_sections("", attention_config(kind)))[1:]
    }
    return list(parts.values())


def kind_meaning(kind: str) -> str:
    """The sentence with which a kind's module begins."""
    module = inspect.getmodule(attention_config(kind))
    return "" if module is None else _first_paragraph(module)


def _sections(path: str, cls: type[Any]) -> Iterator[Section]:
    yield Section(path.removesuffix("."), _first_paragraph(cls), _keys(path, cls))
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        below = hints[field.name]
        if _is_section(below):
            yield from _sections(f"{path}{field.name}.", below)
        elif (entry := entry_class(below)) is not None and _is_section(entry):
            each = "NAME" if typing.get_origin(below) is dict else "N"
            yield from _sections(f"{path}{field.name}.{each}.", entry)


def _keys(path: str, cls: type[Any], *, has_parts: bool = False) -> tuple[Key, ...]:
    """Those of a class; with has_parts, also those that have keys of their own."""
    hints, meanings = typing.get_type_hints(cls), _field_docs(cls)
    return tuple(
        Key(f"{path}{field.name}", _type(hints[field.name]), _default(field), meanings[field.name])
        for field in dataclasses.fields(cls)
        if has_parts or not _is_section(hints[field.name])
    )


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and hint is not AttentionConfig


def _first_paragraph(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string literal below each field, those of the classes above it included."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[line.target.id] = " ".join(str(below.value.value).split())
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}


def _type(hint: Any) -> str:
    if hint is AttentionConfig:
        return "mapping with `kind`"
    if _is_section(hint):
        return "mapping"
    entry = entry_class(hint)
    if entry is not None and _is_section(entry):
        is_dict = typing.get_origin(hint) is dict
        return "mapping of names to mappings" if is_dict else "list of mappings"
    if hint == dict[str, float]:
        return "mapping of names to numbers"
    if typing.get_origin(hint) is dict:
        return "mapping of layers to mappings with `kind`"
    if typing.get_origin(hint) is list:
        return "list of numbers" if hint == list[float] else "list of text"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    names |= {list: "list of text"}
    return " or ".join("null" if part is type(None) else names[part] for part in types_of(hint))


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        return "{}" if dataclasses.is_dataclass(default) else repr(default)
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is None:
        return "null"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
