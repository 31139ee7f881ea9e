"""Write the tables of docs/configuration.md from the typed dataclasses.

    python docs/scripts/configuration.py

tests/test_docs.py fails when the page and the dataclasses differ.
"""

from pathlib import Path

from longhaul.configs.reference import Section, kind_section, parts_of_kinds, sections
from longhaul.modules.attention import attention_config, registered_variants

PAGE = Path(__file__).parent.parent / "configuration.md"

_MARK = "<!-- The rest of this page is generated. -->\n"

_VARIANTS = """\

## model.attention

`kind` is the name of a [variant](variants.md); the other keys are that kind's options.
`model.layer_attention` maps layers to other variants, with the same keys.
"""


def page(text: str) -> str:
    """The page with all that follows the mark written anew."""
    parts = [text.partition(_MARK)[0], _MARK]
    parts += [
        f"\n## {one.title or 'The run'}\n\n{one.meaning}\n\n{_table(one)}" for one in sections()
    ]
    parts.append(_VARIANTS)
    parts += [_kind(kind) for kind in registered_variants()]
    parts += [
        f"\n## model.attention.{one.title}\n\n{one.meaning}\n\n{_table(one)}"
        for one in parts_of_kinds()
    ]
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
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
