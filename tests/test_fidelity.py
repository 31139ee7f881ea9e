"""Every file and every test that docs/fidelity.md names is there, and nothing differs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
TEXT = (CHECKOUT / "docs/fidelity.md").read_text(encoding="utf-8")


def tables(text: str = TEXT) -> Iterator[list[list[str]]]:
    """The rows of each table, names of columns first, without the line below those."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        names, _, *rows = block.splitlines()
        # A bar within a cell has a backslash before it.
        yield [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (names, *rows)
        ]


def items() -> Iterator[tuple[list[str], list[str]]]:
    """The rows of the sources, each with the numbered tests of its source."""
    for section in TEXT.split("\n## ")[1:]:
        names, *rows = next(tables(section))
        if names == ["item", "state and note", "file", "tests"]:
            tests = re.findall(r"^(\d+)\. `(.*)`$", section, re.MULTILINE)
            assert [int(number) for number, _ in tests] == list(range(1, len(tests) + 1))
            yield from ((row, [test for _, test in tests]) for row in rows)


ITEMS = list(items())


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def functions(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_source_has_its_items() -> None:
    assert len(ITEMS) > 80
    assert sum(table[0][0] == "item" for table in tables()) == 5


@pytest.mark.parametrize(("row", "names"), ITEMS, ids=[row[0] for row, _ in ITEMS])
def test_an_item_is_faithful_or_missing_for_a_reason(row: list[str], names: list[str]) -> None:
    _, state, files, tests = row
    if state.startswith("missing: "):
        assert not files
        assert not tests
        return
    assert re.match(r"faithful\b", state), state
    assert quoted(files)
    assert tests
    for name in quoted(files):
        assert (CHECKOUT / name).is_file(), name
    for number in tests.split(", "):
        name, _, function = names[int(number) - 1].partition("::")
        assert (CHECKOUT / "tests" / name).is_file(), name
        assert function in functions(CHECKOUT / "tests" / name), function


def test_what_is_open_is_said_in_a_file() -> None:
    (rows,) = (rows for names, *rows in tables() if names == ["open", "chosen here", "said in"])
    assert len(rows) > 20
    for row in rows:
        assert quoted(row[-1])
        for name in quoted(row[-1]):
            assert (CHECKOUT / name).is_file(), name


def test_tables_have_no_broken_rows() -> None:
    for names, *rows in tables():
        for row in rows:
            assert len(row) == len(names), row
