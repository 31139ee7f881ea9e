"""Paths and URLs: how to tell them apart, and what lies beside them."""

import os
import re
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

SQLITE = "sqlite:///"
"""What the address of an MLflow database begins with, before the path of its file."""


class MissingInputError(FileNotFoundError, ValueError):
    """A file or folder that the user named is not there: bad input, not a failure while running."""


def is_remote(location: str) -> bool:
    """Whether it is no path: `scheme://` other than file://.

    So is `pipe:COMMAND`, which earlier versions ran. It is refused where it is read.
    """
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


def begun_at(folder: str | Path, location: str) -> str:
    """A relative path or sqlite URI as one that begins at a folder; others stay as they are."""
    if location.startswith(SQLITE):
        return SQLITE + begun_at(folder, location.removeprefix(SQLITE))
    return location if is_remote(location) else os.path.join(folder, local_path(at_home(location)))


def sibling(location: str, own_name: str, name: str) -> str:
    """The location of the file `name` in the same folder as the file `own_name` at `location`."""
    if is_remote(location):
        return name.join(_around(location, own_name))
    return str(local_path(location).parent / name)


def inside(location: str, name: str) -> str:
    """The remote location itself if it names the file `name`, else that of the file in it."""
    if len(_around(location, name)) > 1:
        return location
    path, rest = _without_query(location)
    return f"{path.rstrip('/')}/{name}{rest}"


def _around(location: str, name: str) -> list[str]:
    """The pieces of a remote location around the file's name, one piece if it is not named.

    A URL names it at the end of its path, or else in its query.
    """
    path, rest = _without_query(location)
    if path.endswith(f"/{name}"):
        return [path.removesuffix(name), rest]
    word = re.compile(rf"(?:(?<=%2[Ff])|(?<![\w.-])){re.escape(name)}(?![\w./-])")
    first, *others = word.split(rest)
    return [path + first, *others]


def _without_query(url: str) -> tuple[str, str]:
    """A URL without its query and fragment, and these, which only web servers have."""
    path = re.split("[?#]", url, maxsplit=1)[0] if url.startswith("http") else url
    return path, url[len(path) :]
