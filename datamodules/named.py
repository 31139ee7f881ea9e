"""What the user has named: hosts, commands and databases that files of others may not bring in.

A file may say where something is. It may not say that a command is run, that another host is
contacted, or that a database elsewhere is written: these things the user names, on a command line
or in a config that is no run's. What was named when a run was started is remembered outside all run
folders, one JSON text a line, so that the user's own runs need not be told again. It is like ssh's
list of known hosts.

A job of Slurm may run where that list is not, so its script brings its part of it in the
environment variable LONGHAUL_NAMED, in the same form.
"""

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from longhaul.datamodules.files.untrusted import one_line, read_regular
from longhaul.datamodules.urls import SQLITE, is_remote, local_path

logger = logging.getLogger(__name__)

Place = str | tuple[str, str]
"""A path, `pipe:COMMAND`, a URL, the `sqlite:///FILE` of a database, or a key and its value."""

VARIABLE = "LONGHAUL_NAMED"
"""The environment variable in which a job has what was named when it was queued."""

_MOST_BYTES = 4 << 20
_LINE: TypeAdapter[Place] = TypeAdapter(Place)
_DATABASES = (".db", ".sqlite", ".sqlite3")
# Stricter than the libraries that open URLs, so that all find the same host in one.
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[\w.~%!$&*+,;=:-]*@)?"
    r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?P<port>:[0-9]{1,5})?"
    r"(?:[/?#][\w.~:/?#\[\]@!$&()*+,;=%-]*)?",
    re.ASCII,
)


def is_named(place: Place) -> bool:
    """Whether reading or writing a place needs nothing that the user has not named."""
    if not _needs_name(place):
        return True
    environment = os.environ.get("MLFLOW_TRACKING_URI", "")
    return _name(place) in {*_remembered(), *([_name(environment)] if environment else [])}


def is_named_store(uri: str, folder: Path) -> bool:
    """Whether a run's file may say that MLflow keeps the run there.

    A database that nobody named may be one in a folder that holds the run's folder, as it is when
    runs are moved together with their database.

    Args:
        uri: `sqlite:///FILE` with an absolute path, or the address of a server.
        folder: of the run.
    """
    if is_named(uri):
        return True
    if not uri.startswith(SQLITE):
        return False
    path = Path(uri.removeprefix(SQLITE))
    is_above = path.parent.resolve() in Path(os.path.realpath(folder)).parents
    return is_above and path.suffix in _DATABASES and not path.is_symlink()


def remember(places: Iterable[Place]) -> None:
    """Remember what the user has named; a warning says where that is impossible."""
    new = sorted(set(names(places)) - set(map(json.dumps, _remembered())))
    if not new:
        return
    path = list_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            size = os.fstat(handle).st_size
            is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            file.write(("\n" * is_torn + "".join(f"{line}\n" for line in new)).encode())
    except OSError as error:
        logger.warning("%s: what you have named is not remembered: %s", path, one_line(error))


def names(places: Iterable[Place]) -> list[str]:
    """Lines of the list for what needs to be named in these places; without passwords."""
    return sorted({json.dumps(_name(place)) for place in places if _needs_name(place)})


def list_file() -> Path:
    """The list of what the user has named."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "longhaul", "named")


def _remembered() -> set[Place]:
    lines = os.environ.get(VARIABLE, "").encode().splitlines()
    path = list_file()
    try:
        status = path.lstat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid == os.getuid() and not others_write and stat.S_ISREG(status.st_mode):
            lines += read_regular(path, _MOST_BYTES).splitlines()
    except (OSError, ValueError):
        pass
    found: set[Place] = set()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # A torn line names nothing.
            found.add(_LINE.validate_json(line))
    return found


def _needs_name(place: Place) -> bool:
    return not isinstance(place, str) or is_remote(place) or place.startswith(SQLITE)


def _name(location: Place) -> Place:
    """The host of a URL, the path of a database, or a whole command or pair."""
    if not isinstance(location, str):
        return location
    if location.startswith(SQLITE):
        return SQLITE + os.path.realpath(local_path(location.removeprefix(SQLITE)))
    match = _URL.fullmatch(location)
    if match is None or match["scheme"] == "pipe":
        return location
    return f"{match['scheme']}://{match['host'].lower()}{match['port'] or ''}"
