"""Paths and URLs: how to tell them apart and read them, and a cache keyed by the whole URL."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlparse
from urllib.request import url2pathname

from longhaul.datamodules.files.atomic import whole_file
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import open_to_write

SQLITE = "sqlite:///"
"""What the address of an MLflow database begins with, before the path of its file."""

_BLOCK_BYTES = 1 << 20
_ATTEMPTS = 3

Result = TypeVar("Result")


class MissingInputError(FileNotFoundError, ValueError):
    """A file or folder that the user named is not there: bad input, not a failure while running."""


def is_remote(location: str) -> bool:
    """Whether webdataset must open it: `pipe:COMMAND`, or `scheme://` other than file://."""
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://|pipe:", location)
    return scheme is not None and scheme.group(1) != "file"


def local_path(location: str) -> Path:
    """The path of a local location, which is a plain path or a file:// URL."""
    if location.startswith("file://"):
        return Path(url2pathname(urlparse(location).path))
    return Path(location)


def at_home(location: str) -> str:
    """A path or sqlite URI with `~` at its beginning replaced by the home folder."""
    scheme, path = "", location
    if location.startswith(SQLITE):
        scheme, path = SQLITE, location.removeprefix(SQLITE)
    return scheme + (os.path.expanduser(path) if path.startswith("~") else path)


def sibling(location: str, own_name: str, name: str) -> str:
    """The location of the file `name` in the same folder as the file `own_name` at `location`."""
    if is_remote(location):
        return name.join(_around(location, own_name))
    return str(local_path(location).parent / name)


def inside(location: str, name: str) -> str:
    """The remote location itself if it names the file `name`, else that of the file in it.

    Raises ValueError if it is a command that does not name the file.
    """
    if len(_around(location, name)) > 1:
        return location
    if location.startswith("pipe:"):
        raise ValueError(f"{location}: found no {name} in the command, wanted one that reads it")
    path, rest = _without_query(location)
    return f"{path.rstrip('/')}/{name}{rest}"


def _around(location: str, name: str) -> list[str]:
    """The pieces of a remote location around the file's name, one piece if it is not named.

    A URL names it at the end of its path, or else in its query. A command names it in its words.
    """
    word = re.compile(rf"(?:(?<=%2[Ff])|(?<![\w.-])){re.escape(name)}(?![\w./-])")
    if location.startswith("pipe:"):
        return word.split(location)
    path, rest = _without_query(location)
    if path.endswith(f"/{name}"):
        return [path.removesuffix(name), rest]
    first, *others = word.split(rest)
    return [path + first, *others]


def _without_query(url: str) -> tuple[str, str]:
    """A URL without its query and fragment, and these."""
    path = re.split("[?#]", url, maxsplit=1)[0]
    return path, url[len(path) :]


def read_remote(url: str, largest: int) -> bytes:
    """The content of a URL. Raises OSError if it has more than `largest` bytes, or is not there."""

    def read() -> bytes:
        content = bytearray()
        for block in _blocks(url):
            content += block
            if len(content) > largest:
                raise OSError(f"more than {largest:,} bytes")
        return bytes(content)

    return _retrying(url, read)


def fetch(url: str, cache_dir: Path, *, is_intact: Callable[[Path], bool]) -> Path:
    """Path of a local copy of `url` that satisfies `is_intact`, fetched once per cache folder.

    The name contains a hash of the whole URL, so that shards of the same name from two sources do
    not collide. Processes take turns to download, and a copy gets its name when it is complete.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rsplit("/", 1)[-1])[-80:]
    path = cache_dir / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}-{name}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    while True:
        before = _identity(path)
        # Without the lock, since it reads the whole file, which all processes may do at a time.
        if before is not None and is_intact(path):
            return path
        with _locked(path.with_name(f"{path.name}.lock")):
            # Otherwise another process has fetched it in the meantime.
            if _identity(path) == before:
                _retrying(url, lambda: _download(url, path, is_intact))
                return path


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when another file takes the place of this one; None without a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _download(url: str, path: Path, is_intact: Callable[[Path], bool]) -> None:
    with whole_file(path) as file:
        for block in _blocks(url):
            file.write(block)
        file.flush()
        if not is_intact(Path(file.name)):
            raise OSError(f"the {file.tell()} bytes received are not the file in the manifest")


def _blocks(url: str) -> Iterator[bytes]:
    # Imported here, because webdataset loads torch, and a local manifest needs neither.
    from webdataset.gopen import gopen

    with gopen(url, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _retrying(url: str, action: Callable[[], Result]) -> Result:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return action()
        except (OSError, ValueError) as error:
            if attempt == _ATTEMPTS:
                raise OSError(f"{url}: cannot be fetched ({error}), {attempt} attempts") from None
            time.sleep(0.5 * attempt)
    raise AssertionError("unreachable")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(open_to_write(path, os.O_WRONLY), "wb") as file:
        lock(file.fileno(), waits=True)
        yield
