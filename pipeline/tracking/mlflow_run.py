"""Finds or creates the one MLflow run of a run folder.

It relies on this behaviour of mlflow 3.17.2, observed on sqlite and with `mlflow server`:

- A process killed while it creates an sqlite store leaves one that never opens again. And if
  several processes create it at once, all but one fail. So it is created under another name, then
  linked.
- On sqlite, an experiment's artifacts go to `mlruns` in the working folder of the process that
  creates the experiment.
- The client retries a dead server for four minutes, and waits 120 s per attempt for one that hangs.
  `set_terminated` prints two lines to stdout. MLflow sends telemetry over the network. Before it
  raises the error of a database, it logs its traceback of a hundred lines. The settings in
  ENVIRONMENT prevent all four.
- Its pages open on traces of GenAI applications, and on training runs only with
  `?workflowType=machine_learning` at the end of the address. The tag `mlflow.experimentKind`
  decides where they have no such switch.
- A finished run that is set to RUNNING again keeps its old end time until it ends again.
"""

import getpass
import importlib
import logging
import os
import re
import socket
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import open_regular, open_to_write, read_regular
from longhaul.datamodules.named import is_named
from longhaul.datamodules.urls import SQLITE
from longhaul.pipeline.system.waiting import ANSWER_S, REQUEST_S
from longhaul.pipeline.tracking.metrics_journal import last_status
from longhaul.pipeline.tracking.mlflow_limits import (
    InUseError,
    is_refusal,
    short_error,
    without_secrets,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

_HEADER = b"SQLite format 3\0"

KEY_TAG = "longhaul.run_key"
KIND_TAG = "mlflow.experimentKind"
TRAINING_KIND = "custom_model_development"  # "Machine learning" on MLflow's pages
# What SQLite keeps beside a database that is open, or that a crash has left.
_BESIDE = ("-journal", "-wal", "-shm", "-mj")
_TABLES = {"alembic_version", "experiments", "latest_metrics", "runs"}  # some of MLflow's

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # The tracker does the retries, because it can be asked to stop.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{REQUEST_S:.0f}",
}

_MOST_ID_BYTES = 1 << 16

_lock_between_threads = threading.Lock()


def load_mlflow(uri: str) -> None:
    """Import MLflow. It takes a second or more, so it is imported only when needed."""
    importlib.import_module("mlflow.tracking")
    if uri.startswith(SQLITE):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        importlib.import_module("sqlalchemy.dialects.sqlite")


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Exclude other threads, and other processes that lock the same file, from the context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_between_threads, open(open_to_write(path, os.O_WRONLY), "wb") as file:
        # Some network file systems have no locks.
        with suppress(OSError):
            lock(file.fileno(), waits=True)
        yield


def absolute_uri(uri: str) -> str:
    """The URI with an absolute path, which stays valid when the working folder changes.

    Raises:
        ValueError: the URI is a plain folder. MLflow 3 keeps runs in a database or behind a server.
    """
    if uri.startswith(SQLITE):
        return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}"
    if "://" not in uri or uri.startswith("file:"):
        raise ValueError(
            f"tracking uri: found {uri!r}, wanted sqlite:///FILE, http://HOST:PORT "
            "or another address of an MLflow server or database"
        )
    return uri


def open_run(
    run_dir: Path,
    *,
    uri: str,
    experiment: str,
    run_name: str,
    start_ms: int,
    is_training: bool = False,
) -> "tuple[MlflowClient, Run]":
    """The MLflow run that belongs to a run folder, created if there is none.

    Its id is written to `RUN/mlflow_run_id`. In addition, a random key is written to the folder
    before the run is created, and to a tag of the run. By this key the run is found again if the
    process is killed between creating the run and writing its id. A copied folder gets a new run.

    Args:
        run_dir: the run folder.
        uri: MLflow's tracking URI, from `absolute_uri`.
        experiment: the experiment for a new run.
        run_name: the name for a new run.
        start_ms: start time of a new run, in milliseconds since 1970.
        is_training: whether the caller sends a status. Otherwise a new run is as the training of
            the folder was left, finished without one, since MLflow would show it as running.

    Raises:
        RuntimeError: the run is deleted, or the database may not be opened.
        ValueError, OSError, sqlite3.Error: as of `check_readable`.
    """
    from mlflow.tracking import MlflowClient  # slow, see load_mlflow

    # A training and an evaluation that start together must not each create a run.
    with _exclusive(run_dir / "logs" / "run_key.lock"):
        key = _run_key(run_dir)
        if uri.startswith(SQLITE):
            database = Path(uri.removeprefix(SQLITE))
            if not is_named(uri):
                _check_unnamed(database)
            _make_sqlite(database, key)
            check_readable(database)
        client = MlflowClient(uri)
        run = _find(client, run_dir, experiment, key)
        if run is None:
            run = client.create_run(
                _experiment_id(client, uri, experiment),
                start_time=start_ms,
                tags={KEY_TAG: key, "mlflow.user": _user()},
                run_name=run_name,
            )
            status = None if is_training else last_status(run_dir / "logs" / "metrics.jsonl")
            if not is_training and status != "RUNNING":
                client.set_terminated(run.info.run_id, status or "FINISHED")
        check_active(run)
        write_atomically(run_dir / "mlflow_run_id", f"{run.info.run_id}\n")
    return client, run


def create_parent(folder: Path, uri: str, experiment: str, name: str) -> str:
    """Create a parent run for the runs of a sweep, once per folder, and return its id.

    Raises:
        RuntimeError: MLflow cannot be reached, or refuses, or what it has is deleted.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    check_answers(uri, "tracking.uri")
    load_mlflow(uri)
    try:
        start_ms = time.time_ns() // 1_000_000
        client, run = open_run(
            folder, uri=uri, experiment=experiment, run_name=name, start_ms=start_ms
        )
        # Otherwise MLflow would show it as running for ever.
        client.set_terminated(run.info.run_id)
    except RuntimeError:
        raise
    except Exception as error:
        what = "refuses" if is_refusal(error) else "cannot be reached"
        message = f"tracking.uri: {uri} {what}: {short_error(error)}"
        raise RuntimeError(without_secrets(message)) from error
    return str(run.info.run_id)


def check_answers(uri: str, where: str) -> None:
    """Raise RuntimeError if nothing answers at a server's address, within seconds.

    MLflow itself would wait for as long as a slow server may need. `where` is the key or the option
    that has the address.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None or getproxies():
        return  # A proxy may reach what this machine does not.
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), ANSWER_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(f"{where}: {without_secrets(uri)} cannot be reached: {reason}") from None


def check_active(run: "Run") -> None:
    """Raise RuntimeError if the run was deleted in MLflow, where it can be restored."""
    if run.info.lifecycle_stage != "active":
        raise RuntimeError(f"run {run.info.run_id} is deleted in MLflow; restore it there")


def checked_parent(client: "MlflowClient", run_id: str | None, experiment_id: str) -> str | None:
    """The id of a parent, None if it is no run of longhaul's in the same experiment.

    The config that names it may be someone else's.
    """
    if run_id is None:
        return None
    try:
        parent = client.get_run(run_id)
    except Exception as error:
        if not is_refusal(error):
            raise
        found = short_error(error)
    else:
        if KEY_TAG in parent.data.tags and parent.info.experiment_id == experiment_id:
            return run_id
        found = "it is no run of longhaul's in the same experiment"
    logger.warning("tracking.parent_run_id is ignored: %s", found)
    return None


def stored_run_id(run_dir: Path) -> str | None:
    """The id in `RUN/mlflow_run_id`, None if MLflow has never been reached."""
    path = run_dir / "mlflow_run_id"
    if not path.exists():
        return None
    run_id = read_regular(path, _MOST_ID_BYTES).decode(errors="replace").strip()
    # It becomes part of MLflow's addresses.
    return run_id if re.fullmatch(r"[A-Za-z0-9_-]{1,256}", run_id) else None


def _find(client: "MlflowClient", run_dir: Path, experiment: str, key: str) -> "Run | None":
    from mlflow.exceptions import MlflowException

    run_id = stored_run_id(run_dir)
    if run_id is not None:
        try:
            run = client.get_run(run_id)
            if run.data.tags.get(KEY_TAG) == key:
                return run
            logger.warning(
                "%s: found run %s of another folder; MLflow has this folder as a run of its own",
                run_dir / "mlflow_run_id",
                run_id,
            )
        except MlflowException as error:
            # It is another server or a new database. The whole journal is uploaded there.
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    runs = client.search_runs([known.experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    return runs[0] if runs else None


def _experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None:
        if known.lifecycle_stage != "active":
            raise RuntimeError(
                f"tracking.experiment: found {name!r}, which is deleted in MLflow; wanted another "
                "name, or first: MLFLOW_TRACKING_URI="
                f"{without_secrets(uri)} mlflow experiments restore -x {known.experiment_id}"
            )
        if KIND_TAG not in known.tags:
            client.set_experiment_tag(known.experiment_id, KIND_TAG, TRAINING_KIND)
        return known.experiment_id
    location = None
    if uri.startswith(SQLITE):
        beside = Path(uri.removeprefix(SQLITE)).parent / "mlruns"
        location = str(beside / re.sub(r"[^\w.-]|^\.{1,2}$", "_", name))
    try:
        return client.create_experiment(name, location, {KIND_TAG: TRAINING_KIND})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return _experiment_id(client, uri, name)  # Another process was faster.


def _check_unnamed(path: Path) -> None:
    """Raise RuntimeError unless a database that the user has not named is MLflow's, and alone.

    SQLite does what a journal beside a database says, and removes a file that the journal names.
    MLflow creates its tables in any database.
    """
    if "?" in path.name:  # SQLAlchemy opens the file whose name ends there
        raise RuntimeError(f"found {path.name!r}, wanted a database without ? in its name")
    beside = os.listdir(path.parent) if path.parent.exists() else []
    for name in sorted(beside):
        if name.startswith(tuple(f"{path.name}{ending}" for ending in _BESIDE)):
            raise InUseError(
                f"found {name}, as after a crash, wanted {path.name} alone; if you trust both, "
                "open it once with `mlflow ui`, or set MLFLOW_TRACKING_URI to it"
            )
    if path.name not in beside:
        return
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RuntimeError(f"found {path.name}, which is no regular file, wanted a database")
    try:
        # Without `immutable`, SQLite would leave files beside some databases.
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            is_mlflows = {name for (name,) in tables} >= _TABLES
    except sqlite3.Error:
        is_mlflows = False
    if not is_mlflows:
        raise RuntimeError(f"found {path.name} without MLflow's tables, wanted MLflow's database")


def check_readable(database: Path) -> None:
    """Raise an error unless SQLite reads the database, which MLflow would try for a minute.

    Raises:
        ValueError: it is no regular file.
        OSError: it may not be read.
        sqlite3.Error: it is no database, or locked.
    """
    # SQLite opens every file for writing, also one that is no database.
    with open_regular(database) as file:
        header = file.read(len(_HEADER))
    if header not in (b"", _HEADER):
        raise sqlite3.DatabaseError("file is not a database")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("SELECT name FROM sqlite_master").fetchone()


def _make_sqlite(path: Path, key: str) -> None:
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{key}")
    for ending in ("", *_BESIDE):
        temporary.with_name(f"{temporary.name}{ending}").unlink(missing_ok=True)
    try:
        store = SqlAlchemyStore(  # type: ignore[no-untyped-call]
            f"{SQLITE}{temporary}", str(path.parent / "mlruns")
        )
        store.engine.dispose()
        os.link(temporary, path)
    except FileExistsError:
        pass  # Another process was faster; its store serves as well.
    finally:
        temporary.unlink(missing_ok=True)


def _run_key(run_dir: Path) -> str:
    """The folder's key. A moved folder keeps its key, a copied one gets a new key."""
    path, folder = run_dir / "logs" / "run_key", str(run_dir.absolute())
    key = uuid.uuid4().hex
    if path.exists():
        content = read_regular(path, _MOST_ID_BYTES).decode(errors="replace").replace("\0", "")
        known, _, known_folder = content.strip().partition("\n")
        known = re.sub(r"[^0-9a-f]", "", known)[:32] or key
        if known_folder == folder:
            return known
        is_path = known_folder.startswith("/") and known_folder.isprintable()
        original = Path(known_folder) / "logs" / "run_key"
        if is_path and _is_copy(path, original):
            is_own = original.stat().st_uid == os.getuid()
            shown = known_folder if is_own else Path(known_folder).name
            logger.warning("%s is a copy of %s: it gets an MLflow run of its own", folder, shown)
            (run_dir / "mlflow_run_id").unlink(missing_ok=True)
        else:
            key = known
    write_atomically(path, f"{key}\n{folder}\n")
    return key


def _is_copy(path: Path, original: Path) -> bool:
    try:
        # The same inode under two paths, through a link or another mount, is the same folder.
        is_another = original.stat().st_ino != path.stat().st_ino
        return is_another and read_regular(original, _MOST_ID_BYTES) == read_regular(
            path, _MOST_ID_BYTES
        )
    except (OSError, ValueError):
        return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # A container may run under a user id that has no name.
