"""Write docs/configuration.md from the typed dataclasses: `python docs/scripts/configuration.py`.

tests/test_docs.py fails when the page and the dataclasses differ.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longhaul.configs import RunConfig
from longhaul.modules.attention import AttentionConfig, attention_config, registered_variants

PAGE = Path(__file__).parent.parent / "configuration.md"

_INTRODUCTION = """\
# Configuration

A run is described by one YAML file, and by `key.sub=value` on the command line, which wins:

```sh
longhaul train run/demo.yaml name=wide model.width=384
```

- CONFIG is the path of a file, or the name of a preset that ships, such as `run/demo.yaml`.
- `inherits: [other.yaml]` merges other files first, in order; their paths are relative to the file,
  or names of presets.
- The order of precedence is: default, inherited file, file, command line.
- An unknown key, a wrong type or a value out of range ends the command before anything starts, with
  one line that names the key, what was found and what was wanted, and status 2.
- Where another kind of attention is chosen over an inherited one, options that it has are kept, and
  the others are dropped.
- `null` stands for "absent". Strings need quotes only where YAML would read something else.
- Whole numbers may be written with underscores: `trainer.max_tokens=1_000_000`.
- A run folder keeps the whole config, with all defaults written out, in `config.yaml`.

`make docs` generates the tables below from the dataclasses. Keys with "required" have no default.
"""

_VARIANTS = """\

## model.attention

`kind` is the name of a [variant](variants.md); the other keys are that kind's options.
`model.layer_attention` maps layers to other variants, with the same keys.
"""


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    parts += [_section(path, cls) for path, cls in _sections("", RunConfig)]
    parts.append(_VARIANTS)
    parts += [_kind(kind) for kind in registered_variants()]
    return "".join(parts)


def _sections(path: str, cls: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    """A dataclass and those below it, each with the path that its keys begin with."""
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        below = hints[field.name]
        if dataclasses.is_dataclass(below) and below is not AttentionConfig:
            yield from _sections(f"{path}{field.name}.", below)  # type: ignore[arg-type]


def _section(path: str, cls: type[Any]) -> str:
    title = path.removesuffix(".") or "The run"
    return f"\n## {title}\n\n{_sentence(cls)}\n\n{_table(path, cls)}"


def _kind(kind: str) -> str:
    cls = attention_config(kind)
    above = cls.__mro__[1]
    for other in registered_variants():
        if above is attention_config(other) and _names(above) == _names(cls):
            return f"\n### {kind}\n\nThe options of [{other}](#{other}).\n"
    told = _table("", cls) if dataclasses.fields(cls) else ""
    return f"\n### {kind}\n\n{_sentence(cls)}\n" + (f"\n{told}" if told else "")


def _names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _sentence(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def _table(path: str, cls: type[Any]) -> str:
    hints = typing.get_type_hints(cls)
    told = field_docs(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]) and hints[field.name] is not AttentionConfig:
            continue  # a section of its own
        cells = (f"`{path}{field.name}`", _type(hints[field.name]), _default(field))
        rows.append("| " + " | ".join([*map(_escaped, cells), told.get(field.name, "")]) + " |")
    head = "| key | type | default | what it does |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def field_docs(cls: type[Any]) -> dict[str, str]:
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
                found[line.target.id] = _escaped(" ".join(str(below.value.value).split()))
    return found


def _type(hint: Any) -> str:
    if hint is AttentionConfig:
        return "mapping with `kind`"
    if typing.get_origin(hint) is dict:
        return "mapping of layers to mappings with `kind`"
    if typing.get_origin(hint) is list:
        return "list of text"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    parts = typing.get_args(hint) or (hint,)
    return " or ".join("null" if part is type(None) else names[part] for part in parts)


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is None:
        return "`null`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
