"""Write docs/configuration.md from the typed dataclasses: `python docs/scripts/configuration.py`.

tests/test_docs.py fails when the page and the dataclasses differ.
"""

from pathlib import Path

from longhaul.configs.reference import Section, kind_section, sections
from longhaul.modules.attention import attention_config, registered_variants

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
- `null` stands for "absent". A key that is text takes what stands there, also `1e3`, `no` or
  `12:00:00`; quotes are needed around `null` as a name, around blanks at an end, and in files
  around what has a meaning in YAML, such as `#`.
- `~` at the beginning of a path is the home folder.
- Whole numbers, here and in the options of all commands, may have underscores, an exponent or a
  unit: `1_000_000`, `1e6`, `1M`. `k`, `M`, `B` (or `G`) and `T` are powers of 1,000; `Ki`, `Mi`,
  `Gi` and `Ti` are powers of 1,024. Only in the length of a sequence (`data.context`,
  `--contexts`, `--doc-tokens` and their like) `k` and `M` are powers of 1,024 too:
  `data.context=4k` is 4,096, as everybody means it. The log says what was understood.
- `longhaul config CONFIG key.sub=value` prints the whole config; `longhaul config --keys`,
  `--kinds` and `--presets` list what there is.
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
    parts += [
        f"\n## {one.title or 'The run'}\n\n{one.meaning}\n\n{_table(one)}" for one in sections()
    ]
    parts.append(_VARIANTS)
    parts += [_kind(kind) for kind in registered_variants()]
    return "".join(parts)


def _kind(kind: str) -> str:
    above = attention_config(kind).__mro__[1]
    section = kind_section(kind)
    for other in registered_variants():
        if above is attention_config(other) and kind_section(other).keys == section.keys:
            return f"\n### {kind}\n\nThe options of [{other}](#{other}).\n"
    return f"\n### {kind}\n\n{section.meaning}\n" + (f"\n{_table(section)}" if section.keys else "")


def _table(section: Section) -> str:
    rows = ["| key | type | default | what it does |", "|---|---|---|---|"]
    for key in section.keys:
        default = key.default if key.default == "required" else f"`{key.default}`"
        cells = (f"`{key.name}`", key.type, default, key.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
