"""Finds or creates the one MLflow run of a run folder.

Found by trying mlflow 3.17.2, on sqlite and through `mlflow server`, and relied on here:

- A process killed while it makes a new sqlite store leaves one that never opens again, and of
  several that make it at once all but one fail. So it is made under another name, then linked.
- An experiment's artifacts go to `mlruns` in the working folder of whoever creates it on sqlite.
- The client retries a dead server for four minutes, and one that hangs for 120 s each time;
  `set_terminated` prints two lines to stdout; use is reported over the network. ENVIRONMENT stops
  all three.
- A run that finished and is set to RUNNING again keeps its old end time until the next end.
"""

import fcntl
import getpass
import importlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from longhaul.pipeline.system.files import write_atomically
from longhaul.pipeline.tracking.mlflow_limits import one_line

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

KEY_TAG = "longhaul.run_key"
_SQLITE = "sqlite:///"

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # Retrying is done by the tracker, which can be told to stop. A slow server may need seconds
    # for a thousand rows that it already has; one that hangs must not hold the thread for long.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}

# A process forked while another thread is inside an import inherits a lock that nobody will
# release, and hangs when it imports the same module. Data loading workers are forked at about the
# moment when MLflow is imported, so a fork waits for the import to end.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)

_finding = threading.Lock()


def load_mlflow(uri: str) -> None:
    """Import MLflow: a second or more, hence not at the top and not before somebody needs it."""
    with _importing:
        importlib.import_module("mlflow.tracking")
        if uri.startswith(_SQLITE):
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
            importlib.import_module("sqlalchemy.dialects.sqlite")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other threads, and other processes that use the same file, out of the block.

    A POSIX lock does nothing between threads, but unlike flock it is not inherited by workers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _finding, path.open("w") as file:
        # Some network file systems have no locks.
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def absolute_uri(uri: str) -> str:
    """The same store whatever the working folder becomes.

    Raises:
        ValueError: MLflow 3 keeps runs in a database or behind a server, not in plain folders.
    """
    if uri.startswith(_SQLITE):
        return f"{_SQLITE}{Path(uri.removeprefix(_SQLITE)).absolute()}"
    if "://" not in uri or uri.startswith("file:"):
        raise ValueError(
            f"tracking uri: found {uri!r}, wanted sqlite:///FILE, http://HOST:PORT "
            "or another address of an MLflow server or database"
        )
    return uri


def open_run(
    run_dir: Path, *, uri: str, experiment: str, run_name: str, start_ms: int
) -> "tuple[MlflowClient, Run]":
    """The MLflow run that belongs to a folder, created if there is none.

    Its id is kept in `RUN/mlflow_run_id`. A key made before MLflow knows of the run is kept in the
    folder and in a tag, so that a process killed between creating the run and noting its id does
    not create a second one. The copy of a folder gets a run of its own.

    Args:
        run_dir: the run folder.
        uri: where MLflow is, from `absolute_uri`.
        experiment: the experiment for a new run.
        run_name: the name for a new run.
        start_ms: when a new run began, milliseconds since 1970.
    """
    from mlflow.tracking import MlflowClient  # See load_mlflow.

    # A training and an evaluation that start together must not each create a run.
    with _alone(run_dir / "logs" / "run_key.lock"):
        key = _run_key(run_dir)
        if uri.startswith(_SQLITE):
            _make_sqlite(Path(uri.removeprefix(_SQLITE)), key)
        client = MlflowClient(uri)
        run = _find(client, run_dir, experiment, key)
        if run is None:
            run = client.create_run(
                _experiment_id(client, uri, experiment),
                start_time=start_ms,
                tags={KEY_TAG: key, "mlflow.user": _user()},
                run_name=run_name,
            )
        check_active(run)
        write_atomically(run_dir / "mlflow_run_id", f"{run.info.run_id}\n")
    return client, run


def create_parent(folder: Path, uri: str, experiment: str, name: str) -> str:
    """A run that only holds others, made once for a folder; its id.

    Raises:
        RuntimeError: MLflow cannot be reached.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    load_mlflow(uri)
    try:
        start_ms = time.time_ns() // 1_000_000
        client, run = open_run(
            folder, uri=uri, experiment=experiment, run_name=name, start_ms=start_ms
        )
        # It would be shown as running for ever.
        client.set_terminated(run.info.run_id)
    except Exception as error:
        raise RuntimeError(f"tracking.uri: {uri} cannot be reached: {one_line(error)}") from error
    return str(run.info.run_id)


def check_active(run: "Run") -> None:
    """Raise if somebody deleted the run in MLflow, where it can also be restored."""
    if run.info.lifecycle_stage != "active":
        raise RuntimeError(f"run {run.info.run_id} is deleted in MLflow; restore it there")


def noted_run_id(run_dir: Path) -> str | None:
    """The id in `RUN/mlflow_run_id`, None before MLflow was first reached."""
    path = run_dir / "mlflow_run_id"
    return path.read_text().strip() if path.exists() else None


def _find(client: "MlflowClient", run_dir: Path, experiment: str, key: str) -> "Run | None":
    from mlflow.exceptions import MlflowException

    noted = noted_run_id(run_dir)
    if noted is not None:
        try:
            return client.get_run(noted)
        except MlflowException as error:
            # Another server, or a new database: the journal is copied there from its start.
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    found = client.search_runs([known.experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    return found[0] if found else None


def _experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    known = client.get_experiment_by_name(name)
    if known is not None:
        return known.experiment_id
    location = None
    if uri.startswith(_SQLITE):
        beside = Path(uri.removeprefix(_SQLITE)).parent / "mlruns"
        location = str(beside / re.sub(r"[^\w.-]", "_", name))
    return client.create_experiment(name, artifact_location=location)


def _make_sqlite(path: Path, key: str) -> None:
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{key}")
    temporary.unlink(missing_ok=True)
    try:
        store = SqlAlchemyStore(  # type: ignore[no-untyped-call]
            f"{_SQLITE}{temporary}", str(path.parent / "mlruns")
        )
        store.engine.dispose()
        os.link(temporary, path)
    except FileExistsError:
        pass  # Another process was quicker; its store is as good.
    finally:
        temporary.unlink(missing_ok=True)


def _run_key(run_dir: Path) -> str:
    """The folder's key. A folder that was moved keeps it, one that was copied gets its own."""
    path, folder = run_dir / "logs" / "run_key", str(run_dir.absolute())
    key = uuid.uuid4().hex
    if path.exists():
        known, _, before = path.read_text().strip().partition("\n")
        if before == folder:
            return known
        if _is_copy(path, Path(before) / "logs" / "run_key"):
            logger.warning("%s is a copy of %s: it gets an MLflow run of its own", folder, before)
            (run_dir / "mlflow_run_id").unlink(missing_ok=True)
        else:
            key = known
    write_atomically(path, f"{key}\n{folder}\n")
    return key


def _is_copy(path: Path, original: Path) -> bool:
    try:
        # One file under two paths, of a link or another mount, is one folder.
        is_another = original.stat().st_ino != path.stat().st_ino
        return is_another and original.read_text() == path.read_text()
    except OSError:
        return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # Containers run under numbers that have no name.
