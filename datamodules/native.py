"""Calls of libraries that are not written in Python, with content that anyone may have written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from longhaul.datamodules.untrusted import one_line

_STDERR = 2
# What ends a process, or a generator, on purpose.
_PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)


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
    except _PASSED_ON:
        raise
    except BaseException as error:
        # Libraries report damage as an OSError too, but one without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{where}: {what}, {one_line(error)}") from None


@contextmanager
def without_panic_messages() -> Iterator[None]:
    """Drop what is written to the standard error if the body raises something that is no Exception.

    Rust writes some lines there when it panics, before Python hears of it.
    """
    if not hasattr(os, "memfd_create"):
        yield
        return
    try:
        saved = os.dup(_STDERR)
    except OSError:  # it is closed
        yield
        return
    held = os.memfd_create("stderr")
    panicked = False
    os.dup2(held, _STDERR)
    try:
        yield
    except _PASSED_ON:
        raise
    except BaseException as error:
        panicked = not isinstance(error, Exception)
        raise
    finally:
        os.dup2(saved, _STDERR)
        if not panicked and (size := os.fstat(held).st_size):
            os.write(saved, os.pread(held, size, 0))
        os.close(saved)
        os.close(held)
