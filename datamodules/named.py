"""What the user has named: hosts, commands and databases that files of others may not bring in.

A file may say where something is. It may not say that a command is run, that another host is
contacted, or that a database elsewhere is written: these things the user names, on a command line
or in a config that is no run's. What was named when a run was started is remembered outside all run
folders, one JSON text a line, so that the user's own runs need not be told again. It is like ssh's
list of known hosts.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from longhaul.datamodules.untrusted import read_regular
from longhaul.datamodules.urls import is_remote, local_path

_MOST_BYTES = 4 << 20
_SQLITE = "sqlite:///"
_DATABASES = (".db", ".sqlite", ".sqlite3")
# webdataset puts a URL into a shell command, between apostrophes.
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[\w.~%!$&*+,;=:-]*@)?"
    r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?P<port>:[0-9]{1,5})?"
    r"(?:[/?#][\w.~:/?#\[\]@!$&()*+,;=%-]*)?",
    re.ASCII,
)


def is_named(location: str) -> bool:
    """Whether reading or writing a location needs nothing that the user has not named.

    Args:
        location: a path, `pipe:COMMAND`, a URL, or the `sqlite:///FILE` of a database.
    """
    if not (is_remote(location) or location.startswith(_SQLITE)):
        return True
    environment = os.environ.get("MLFLOW_TRACKING_URI", "")
    known = {*_remembered(), *([_place(environment)] if environment else [])}
    return _place(location) in known


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
    if not uri.startswith(_SQLITE):
        return False
    path = Path(uri.removeprefix(_SQLITE))
    is_above = path.parent.resolve() in Path(os.path.realpath(folder)).parents
    return is_above and path.suffix in _DATABASES and not path.is_symlink()


def remember(locations: Iterable[str]) -> None:
    """Remember what the user has named. Without a folder for it, it has to be named each time."""
    places = {
        _place(location)
        for location in locations
        if is_remote(location) or location.startswith(_SQLITE)
    }
    new = sorted(places - _remembered())
    if not new:
        return
    path = _file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
    except OSError:
        return
    with os.fdopen(handle, "wb") as file:
        file.write("".join(f"{json.dumps(place)}\n" for place in new).encode())


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "longhaul", "named")


def _remembered() -> set[str]:
    path = _file()
    try:
        status = path.lstat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.getuid() or others_write or not stat.S_ISREG(status.st_mode):
            return set()
        lines = read_regular(path, _MOST_BYTES).splitlines()
        return {str(json.loads(line)) for line in lines}
    except (OSError, ValueError, RecursionError):
        return set()


def _place(location: str) -> str:
    """The host of a URL, the path of a database, or a whole command."""
    if location.startswith(_SQLITE):
        return _SQLITE + os.path.realpath(local_path(location.removeprefix(_SQLITE)))
    match = _URL.fullmatch(location)
    if match is None or match["scheme"] == "pipe":
        return location
    return f"{match['scheme']}://{match['host'].lower()}{match['port'] or ''}"
