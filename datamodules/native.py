"""Calls of libraries that are not written in Python, with content that anyone may have written."""

from collections.abc import Iterator
from contextlib import contextmanager

from longhaul.datamodules.files.untrusted import one_line

ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a process, or a generator, on purpose, and is passed on."""


@contextmanager
def foreign_content(where: object, what: str) -> Iterator[None]:
    """Turn whatever a library raises, and not only `Exception`, into a ValueError of one line.

    A panic of a library in Rust derives from BaseException. An error of the operating system, such
    as one of reading a disk, is passed on.

    Args:
        where: path or URL of the content.
        what: is wrong with it if the library fails.
    """
    try:
        yield
    except ENDINGS:
        raise
    except BaseException as error:
        # Libraries report damage as an OSError too, but one without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{where}: {what}, {one_line(error)}") from None
