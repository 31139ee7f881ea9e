"""The texts of tables, Parquet's and Arrow's: of each row, the string that a key names.

Rows are read by batches, which are never joined: more than 2 GiB of strings do not fit into one
array. A table is damaged if it ends before its end, even behind a whole batch.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longhaul.datamodules.files.untrusted import one_line, open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.text_files.keys import found_keys, path_of, value_at
from longhaul.datamodules.preparation.text_files.parts import FilePart, parts_of_groups

_ARROW_FILE = b"ARROW1\0\0"
# In front of each message of a stream, with the message's length behind it.
_ARROW_STREAM = b"\xff\xff\xff\xff"

_PARQUET_ROWS = 64
_ARROW_ROWS = 1024
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_NO_PARQUET = "not readable as parquet"
_NO_ARROW = "not readable as Arrow"


def is_parquet(head: bytes) -> bool:
    """Whether these first bytes are those of a Parquet file."""
    return head.startswith(b"PAR1") and b"\0" in head


def is_arrow(head: bytes) -> bool:
    """Whether these first bytes are those of Arrow's IPC, a file or a stream."""
    return head.startswith((_ARROW_FILE, _ARROW_STREAM))


def parquet_texts(path: Path, key: str, part: FilePart) -> Iterator[tuple[int, str]]:
    """Numbers of rows, from 1, and their texts; that of a null is empty.

    Args:
        part: row groups.

    Raises:
        ValueError: with the file, and the row where one is damaged.
    """
    # Imported here, because it is slow and only parquet files need it.
    import pyarrow.parquet

    with foreign_content(path, _NO_PARQUET):
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        schema = file.schema_arrow
    with file:
        names = _column(path, schema, key)
        batches = file.iter_batches(
            _PARQUET_ROWS,
            row_groups=list(range(file.num_row_groups))[part.start : part.stop],
            # This reads one leaf of a nested column.
            columns=[".".join(names)],
            use_threads=False,
        )
        rows = part.before
        while True:
            with foreign_content(path, _NO_PARQUET):
                batch = next(batches, None)
            if batch is None:
                return
            yield from _texts_in(batch, names, path, rows)
            rows += batch.num_rows


def parts_of_parquet(path: Path, size: int) -> list[FilePart]:
    """Parts of about `size` bytes, each of whole row groups; errors as above."""
    import pyarrow.parquet

    with foreign_content(path, _NO_PARQUET):
        metadata = pyarrow.parquet.read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [(group.total_byte_size, group.num_rows) for group in groups]
    return parts_of_groups(sizes, size)


def arrow_texts(path: Path, key: str, part: FilePart) -> Iterator[tuple[int, str]]:
    """Numbers of rows, from 1, and their texts, of an IPC stream or file; errors as above.

    Args:
        part: record batches. Of a stream, those before are skipped without reading their texts.
    """
    content = _mapped(path)
    with foreign_content(path, _NO_ARROW):
        schema = _opened(_reader(content)).schema
    names = _column(path, schema, key)
    rows = part.before
    batches = _arrow_batches(content, path, schema.get_field_index(names[0]), part.start)
    for number, whole in enumerate(batches, part.start):
        if number == part.stop:
            return
        # A file may be one batch.
        for start in range(0, whole.num_rows, _ARROW_ROWS):
            batch = whole.slice(start, _ARROW_ROWS)
            # Arrow checks no offset and no index, which decide what memory is read.
            where = f"{path}: rows {rows + 1} to {rows + batch.num_rows}"
            with foreign_content(where, "damaged"):
                batch.validate(full=True)
            yield from _texts_in(batch, names, path, rows)
            rows += batch.num_rows
            # Else all that was read would count as memory of this process.
            content.madvise(mmap.MADV_DONTNEED)


def parts_of_arrow(path: Path, size: int) -> list[FilePart]:
    """Parts of about `size` bytes, each of whole record batches; errors as above.

    All batches are counted for that, and none of their texts is read.
    """
    return parts_of_groups(_arrow_sizes(path), size)


def arrow_rows(path: Path) -> int:
    """Rows of an IPC stream or file, whose texts are not read; errors as above."""
    return sum(rows for _, rows in _arrow_sizes(path))


def _arrow_sizes(path: Path) -> list[tuple[int, int]]:
    """Of each batch about how many bytes it has, and how many rows."""
    content = _mapped(path)
    # The rows of a column are those of all.
    rows = [batch.num_rows for batch in _arrow_batches(content, path, 0, 0)]
    return [(len(content) // len(rows), each) for each in rows]


def _arrow_batches(content: mmap.mmap, path: Path, column: int, first: int) -> Iterator[Any]:
    """The batches from this number on, with this column alone."""
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=[column])
    with foreign_content(path, _NO_ARROW):
        file = _reader(content)
        reader = _opened(file, options)
    if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
        for number in range(first, reader.num_record_batches):
            with foreign_content(path, _NO_ARROW):
                batch = reader.get_batch(number)
            yield batch
        return
    number = 0
    while True:
        before = file.tell()
        with foreign_content(path, _NO_ARROW):
            batch = next(reader, None)
        if batch is None:
            break
        if number >= first:
            yield batch
        number += 1
    # A stream may end without its end marker, as one that is cut behind a batch does.
    if file.tell() == before:
        raise ValueError(f"{path}: found no end marker, wanted a whole Arrow stream: a cut copy")
    if more := file.size() - file.tell():
        raise ValueError(f"{path}: found {more:,} bytes after the Arrow stream, wanted its end")


def _mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, of which those that nobody asks for are not read.

    It is closed with the last batch that refers to it.
    """
    with open_regular(path) as file, foreign_content(path, _NO_ARROW):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _reader(content: mmap.mmap) -> Any:
    import pyarrow

    return pyarrow.BufferReader(pyarrow.py_buffer(content))


def _opened(file: Any, options: Any = None) -> Any:
    """A reader of the stream or file from its beginning."""
    import pyarrow.ipc

    file.seek(0)
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file, options=options)


def _column(path: Path, schema: Any, key: str) -> list[str]:
    """The names of the column and the fields in it that lead to the texts."""
    tree = _tree(schema)
    names = path_of(tree, key)
    if names is None and (times := schema.names.count(key)) > 1:
        others = f"; {found_keys(tree)}" if tree else ""
        raise ValueError(f"{path}: found {times} columns `{key}`, wanted one{others}")
    if names is None:
        raise ValueError(
            f"{path}: columns {shown(schema.names)}, wanted a `{key}`, once; {found_keys(tree)}"
        )
    kind = value_at(tree, names)
    if not _is_text(kind):
        found = one_line(schema.field(names[0]).type if isinstance(kind, Mapping) else kind)
        raise ValueError(
            f"{path}: column `{key}` is {found}, wanted strings or bytes of UTF-8; "
            f"{found_keys(tree)}"
        )
    return names


def _tree(fields: Any) -> dict[str, Any]:
    """The types of the fields of a schema or a struct by name, without names that are there twice.

    A field that is a struct is a dictionary again.
    """
    from pyarrow import types

    fields = list(fields)
    names = [field.name for field in fields]
    return {
        field.name: _tree(field.type) if types.is_struct(field.type) else field.type
        for field in fields
        if names.count(field.name) == 1
    }


def _is_text(kind: Any) -> bool:
    """Whether a column of this type of Arrow's holds strings, or bytes, each once or repeated."""
    from pyarrow import types

    if isinstance(kind, Mapping):
        return False
    while types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in _TEXT_TYPES


def _texts_in(batch: Any, names: list[str], path: Path, before: int) -> Iterator[tuple[int, str]]:
    import pyarrow.compute

    column = batch.column(batch.schema.get_field_index(names[0]))
    if names[1:]:
        column = pyarrow.compute.struct_field(column, names[1:])
    for number, value in enumerate(column, before + 1):
        with foreign_content(f"{path}: row {number}", "no text in UTF-8"):
            text = value.as_py()
            text = text.decode() if isinstance(text, bytes) else text
        yield number, text or ""
