"""Prints rows as an aligned table."""

from collections.abc import Callable, Sequence

from longhaul.datamodules.files.plain_text import plain


def print_table(
    rows: Sequence[Sequence[str]], *, align: Callable[[str, int], str] = str.rjust
) -> None:
    """Print columns as wide as their widest cell.

    Args:
        rows: all of the same length.
        align: of all columns but the first, which is left-aligned.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(align, others, widths[1:])]
        print("  ".join(cells).rstrip())
