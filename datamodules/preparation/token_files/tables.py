"""Columns of lists of whole numbers in Parquet and Arrow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longhaul.datamodules.files.untrusted import one_line, open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.token_files.mds import USUAL_COLUMNS
from longhaul.datamodules.preparation.token_files.sources import Items
from longhaul.datamodules.preparation.token_files.stored import Batch, unsigned

Kind = Literal["parquet", "stream", "file"]
MAGICS: dict[bytes, Kind] = {
    b"PAR1": "parquet",
    b"ARROW1": "file",
    b"\xff\xff\xff\xff": "stream",
}
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_ROWS = 256


@dataclass(frozen=True)
class Table(Items):
    name: str
    files: tuple[Path, ...]
    kind: Kind
    column: str
    unit = "row"

    def batches(self) -> Iterator[Batch]:
        path = self.files[0]
        row = 0
        with _opened(path, self.kind, [self.column]) as (_, read):
            while True:
                with foreign_content(path, "damaged"):
                    batch = read()
                    if batch is None:
                        return
                    column = batch.column(batch.schema.names.index(self.column))
                    # Arrow believes the offsets of a file, and would read outside of its memory.
                    column.validate(full=True)
                yield _tokens_of(column, f"{path}: row {row + 1:,}")
                row += len(column)


def open_table(name: str, path: Path, kind: Kind, column: str | None) -> Table:
    """A table with a column of tokens.

    Raises:
        ValueError: it is damaged, or has no such column.
    """
    if kind == "stream":
        _check_end(path)
    with _opened(path, kind, None) as (schema, _):
        names = schema.names
        if column is None:
            usual = [one for one in USUAL_COLUMNS if one in names]
            lists = [one.name for one in schema if _is_tokens(one.type)]
            if not usual and len(lists) != 1:
                raise ValueError(
                    f"{path}: found columns {shown(names)}, wanted to know which one holds tokens "
                    "(--column)"
                )
            column = (usual or lists)[0]
        if names.count(column) != 1:
            raise ValueError(f"{path}: found columns {shown(names)}, wanted {shown(column)}, once")
        found = schema.field(column).type
        if not _is_tokens(found):
            raise ValueError(
                f"{path}: column {shown(column)} is {one_line(found)}, wanted lists of whole "
                "numbers"
            )
    return Table(name, (path,), kind, column)


def _check_end(path: Path) -> None:
    """Raise unless a stream has its end: one cut behind a batch reads as a shorter one."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_STREAM_END)))
        if file.read() != _STREAM_END:
            raise ValueError(
                f"{path}: found no end of the Arrow stream, wanted one in the last "
                f"{len(_STREAM_END)} bytes: a cut copy"
            )


@contextmanager
def _opened(
    path: Path, kind: Kind, columns: list[str] | None
) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """The schema of a table, and a function that gives its next rows, or None."""
    # Imported here, because it is slow and only tables need it.
    import pyarrow
    import pyarrow.parquet

    what = f"not readable as {'parquet' if kind == 'parquet' else 'Arrow'}"
    if kind == "parquet":
        with foreign_content(path, what):
            file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
            schema = file.schema_arrow
        with file:
            rows = file.iter_batches(_ROWS, columns=columns, use_threads=False)
            yield schema, lambda: next(rows, None)
        return
    # Read, and not memory-mapped: a file that is cut in the meantime would end the process.
    with open_regular(path) as file:
        with foreign_content(path, what):
            opened = pyarrow.ipc.open_stream if kind == "stream" else pyarrow.ipc.open_file
            reader = opened(file)
        if kind == "stream":
            batches = iter(reader)
        else:
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        yield reader.schema, lambda: next(batches, None)


def _is_tokens(kind: Any) -> bool:
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _tokens_of(column: Any, where: str) -> Batch:
    """The tokens of some rows; a null is a row without tokens."""
    from pyarrow import compute

    values = column.flatten()  # without what is below a null
    if values.null_count:
        raise ValueError(
            f"{where} and the next ones: found a null among the tokens, wanted numbers"
        )
    lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return unsigned(values.to_numpy()), np.cumsum(lengths, dtype=np.int64)
