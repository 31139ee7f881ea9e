"""Reads files that anyone may have written: regular ones, of bounded size, checked by a schema.

A schema is a type that pydantic understands, mostly a dataclass whose fields carry their bounds.
Values are not converted: "2" is no number, and 2.0 and true are no integers. Whatever a schema does
not allow is a ValueError of one line: file, field, value found, value wanted.

Below a folder that may be someone else's, no link is followed where something is written
(`check_no_links`). Text of others is shown without control characters (plain_text.py), and what a
file may say of commands, hosts and databases is in named.py.
"""

import functools
import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Hashable
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from longhaul.datamodules.files.plain_text import plain

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, le=1 << 60)]
"""A number of bytes, tokens, samples or updates."""

Positive = Annotated[int, Field(ge=1, le=1 << 60)]
"""As above, of which there is one or more."""

AtLeastOne = Annotated[int, Field(ge=1)]
"""A number of a config, which has an upper bound where configs are read."""

PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=200)]
"""The name of a file in the folder of the file that names it; it may go into a shell command."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _check_inner(path: str) -> str:
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or re.search(r"['`\"\\]", path):
        raise ValueError(f"found {shown(path)}, wanted a path below the folder, without quotes")
    if plain(path) != path:
        raise ValueError(f"found {shown(path)}, wanted a path without control characters")
    return path


InnerPath = Annotated[str, Field(max_length=1000), AfterValidator(_check_inner)]
"""The path of something below the folder of the file that names it; links are resolved later."""

_MOST_CHARACTERS = 4096
_SHOWN_CHARACTERS = 60
_LINE_CHARACTERS = 300
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _SHOWN_CHARACTERS
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Reading a FIFO would wait for a writer, and reading a device may never end.

    Args:
        flags: more flags of `os.open`; with os.O_NOFOLLOW a link is an OSError.

    Raises:
        ValueError: the path is that of something else.
        OSError: it cannot be opened.
    """
    check_regular(path)
    # Something else may have taken its place since, for which opening must not wait either.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        _check_mode(path, os.fstat(handle).st_mode)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """Raise ValueError unless the path is that of a regular file; OSError if there is nothing."""
    _check_mode(path, path.stat().st_mode)


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: found {_KINDS[stat.S_IFMT(mode)]}, wanted a regular file")


def read_regular(path: Path, largest: int) -> bytes:
    """The content of a regular file of at most `largest` bytes; errors as of `open_regular`."""
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path}: found more than {largest:,} bytes, wanted {largest:,} at most")
    return content


def copy_regular(source: Path, target: Path, largest: int) -> None:
    """Copy at most `largest` bytes of a regular file, whose path must not be that of a link.

    Raises:
        ValueError: it is something else, or larger.
        OSError: it cannot be opened or copied.
    """
    with open_regular(source, os.O_NOFOLLOW) as file, target.open("wb") as copy:
        while block := file.read(1 << 20):
            if copy.tell() + len(block) > largest:
                raise ValueError(f"{source}: found more bytes, wanted {largest:,} at most")
            copy.write(block)


def inner_path(folder: Path, path: str) -> Path:
    """The real path of what a file of a folder names below that folder.

    Raises ValueError if it lies outside after links are resolved, or is not there.
    """
    root, found = folder.resolve(), (folder / path).resolve()
    if not found.is_relative_to(root) or found == root:
        raise ValueError(f"{folder}: found {shown(path)}, wanted a path below the folder")
    if not found.exists():
        raise ValueError(f"{found} does not exist")
    return found


def check_no_links(folder: Path, *names: str) -> None:
    """Raise ValueError at a link in a folder in which something is to be written.

    A folder that someone else has made may hold a link to any file of the user's, which would be
    appended to or emptied. The folder itself may be reached by links.

    Args:
        folder: where something is to be written; it need not exist.
        names: of entries of it that are looked at, with all below them; none means all entries.
    """
    if not folder.is_dir():
        return
    # Not os.walk, which recurses before Python 3.12: folders may be nested a thousand deep.
    left = [entry for entry in os.scandir(folder) if not names or entry.name in names]
    while left:
        entry = left.pop()
        if entry.is_symlink():
            raise ValueError(
                f"{entry.path}: found a link to {shown(os.readlink(entry.path))}, wanted no link "
                f"in {folder}; to keep the run on another disk, move it there whole"
            )
        if entry.is_dir():
            left += os.scandir(entry.path)


def open_to_write(path: Path, flags: int) -> int:
    """Open a regular file for writing, or create it; no link is followed.

    Args:
        flags: of `os.open`, such as os.O_RDWR | os.O_APPEND.

    Raises OSError if it cannot be opened, or is something else than a regular file.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(f"{path}: found a link, wanted a regular file") from error
        if path.is_fifo():  # which nobody reads
            raise OSError(f"{path}: found a FIFO, wanted a regular file") from error
        raise
    try:
        _check_mode(path, os.fstat(handle).st_mode)
    except ValueError as error:
        os.close(handle)
        raise OSError(str(error)) from None
    return handle


def parse_json(schema: type[T], content: bytes | str, where: object) -> T:
    """The value that JSON text describes; `where` names the text in the message of an error.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or does not match the schema.
    """
    try:
        value: T = _adapter(cast(Hashable, schema)).validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first_violation(error)}") from None
    return value


def parse_row(schema: type[T], row: object, where: object) -> T:
    """The value that a row of a CSV describes, in which numbers are text; errors as above."""
    try:
        value: T = _adapter(cast(Hashable, schema)).validate_python(row, strict=False)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first_violation(error)}") from None
    return value


def checked_value(hint: Any, value: object, where: object) -> Any:
    """A value of a type; whole numbers become fractions where those are wanted; errors as above.

    A text may have 4,096 characters, as a path may.
    """
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        raise ValueError(
            f"{where}: found {len(value):,} characters, wanted at most {_MOST_CHARACTERS:,}"
        )
    try:
        return _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
        null = " or null" if type(None) in members else ""
        # Of a union pydantic has an error for each member, and its `loc` begins with that member.
        is_union = len(members) - bool(null) > 1
        loc = error.errors()[0]["loc"]
        below = loc[1:] if is_union else loc
        key = ".".join((str(where), *(_plain(part) for part in below)))
        raise ValueError(f"{key}: {_violation(error, is_union=is_union)}{null}") from None


def check_fields(config: object, prefix: str) -> None:
    """Raise ValueError at the first field of a dataclass whose value its type does not allow.

    Args:
        prefix: what the message puts before the field's name, such as "trainer.".
    """
    for name, hint in _hints(cast(Hashable, type(config))).items():
        checked_value(hint, getattr(config, name), f"{prefix}{name}")


def shown(value: object) -> str:
    """A value as text of bounded length, on one line."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; errors as of `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def one_line(error: object) -> str:
    """A message as one line of bounded length; that of an OSError without its number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    text = plain(" ".join(text.split())) or type(error).__name__
    return text if len(text) <= _LINE_CHARACTERS else f"{text[: _LINE_CHARACTERS - 3]}..."


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _first_violation(error: ValidationError) -> str:
    key = ".".join(_plain(part) for part in error.errors(include_url=False)[0]["loc"])
    violation = _violation(error)
    return f"{key}: {violation}" if key else violation


def _violation(error: ValidationError, *, is_union: bool = False) -> str:
    """What is wrong first; of a union, what each of its members wanted."""
    errors = error.errors(include_url=False)
    first = errors[0]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "json_invalid":
        why = one_line(context.get("error", first["msg"]))
        why = why.replace("EOF while parsing", "it ends within", 1)
        return f"found no JSON, {why if first['input'] else 'it is empty'}; wanted JSON"
    if kind == "missing":
        return "found nothing, wanted a value"
    if kind == "value_error":
        return one_line(context["error"])
    phrases = [
        re.sub(r"^\w+ should (be |have |match )?", "", one["msg"])
        for one in (errors if is_union else errors[:1])
    ]
    wanted = " or ".join(dict.fromkeys(phrases))
    found = first["input"]
    is_word = found is None or isinstance(found, bool)  # as JSON and YAML write it
    return f"found {json.dumps(found) if is_word else shown(found)}, wanted {one_line(wanted)}"


def _plain(part: object) -> str:
    text = str(part)
    return text if len(text) <= _SHOWN_CHARACTERS and text.isprintable() else shown(part)
