"""Which run of MLflow a run folder has, wherever the folder and the store are."""

import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tracked_runs import client_of, copied, history, mlflow_run, started_tracker

from longhaul.pipeline.tracking.metrics_journal import Journal
from longhaul.pipeline.tracking.mlflow_run import absolute_uri, check_readable, create_parent

pytestmark = pytest.mark.usefixtures("quick")


def test_another_store_gets_the_whole_history(
    store: str, empty_store: Path, run_dir: Path, tmp_path: Path
) -> None:
    other = copied(empty_store, tmp_path)
    for step, uri in enumerate((store, other), start=1):
        tracker = started_tracker(run_dir, uri)
        tracker.log("train", step, {"loss": float(step)})
        assert tracker.finish("FINISHED", timeout_s=30)
    assert history(other, run_dir, "loss") == [(1, 1.0), (2, 2.0)]


TO_ANOTHER_PATH: dict[str, Callable[[Path, Path], object]] = {
    "copied": shutil.copytree,
    "moved": Path.rename,
    "linked": lambda folder, other: other.symlink_to(folder),
}


@pytest.mark.parametrize("how", TO_ANOTHER_PATH)
def test_only_a_copied_folder_gets_another_run(store: str, run_dir: Path, how: str) -> None:
    def log(folder: Path, step: int) -> str | None:
        tracker = started_tracker(folder, store)
        tracker.log("train", step, {"loss": float(step)})
        assert tracker.finish("FINISHED", timeout_s=30)
        return tracker.run_id

    first = log(run_dir, 1)
    other = run_dir.with_name("other")
    TO_ANOTHER_PATH[how](run_dir, other)
    assert (log(other, 2) == first) == (how != "copied")
    assert history(store, other, "loss") == [(1, 1.0), (2, 2.0)]
    if how == "copied":
        assert log(run_dir, 3) == first
        assert history(store, run_dir, "loss") == [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [(None, "FINISHED"), ("FINISHED", "FINISHED"), ("KILLED", "KILLED"), ("RUNNING", "RUNNING")],
)
def test_an_evaluated_copy_runs_only_if_it_trains(
    store: str, run_dir: Path, trained: str | None, wanted: str
) -> None:
    if trained is not None:
        journal = Journal(run_dir / "logs" / "metrics.jsonl")
        journal.add("status", status="RUNNING")
        journal.add("status", status=trained)
        journal.close()
    copy = shutil.copytree(run_dir, run_dir.with_name("copy"))
    tracker = started_tracker(copy, store, is_training=False)
    assert tracker.finish(None, timeout_s=30)
    assert mlflow_run(store, copy).info.status == wanted
    # What trains later says so itself.
    assert started_tracker(copy, store).finish(None, timeout_s=30)
    assert mlflow_run(store, copy).info.status == "RUNNING"


def test_a_folder_does_not_take_the_run_of_another_folder(
    store: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = create_parent(tmp_path / "own", store, "tests", "own")
    (run_dir / "mlflow_run_id").write_text(own)
    run_id = create_parent(run_dir, store, "tests", "foreign")
    assert run_id != own
    assert caplog.text.count(f"mlflow_run_id: found run {own} of another folder") == 1
    (run_dir / "mlflow_run_id").write_text(own)  # and its own is found again
    assert create_parent(run_dir, store, "tests", "foreign") == run_id


def test_a_copy_is_told_of_by_a_path_that_can_be_printed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create(name: str, original: str) -> str:
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "run_key").write_text(f"{'ab' * 16}\n{original}")
        return create_parent(tmp_path / name, store, "tests", name)

    for name in ("one", "t\nwo"):
        original = str(tmp_path / "x" / name)
        (tmp_path / "x" / name / "logs").mkdir(parents=True)
        (tmp_path / "x" / name / "logs" / "run_key").write_text(f"{'ab' * 16}\n{original}")
    create("a", str(tmp_path / "x" / "t\nwo"))
    assert "is a copy of" not in caplog.text
    create("b", str(tmp_path / "x" / "one"))
    assert f"is a copy of {tmp_path}/x/one: it" in caplog.text
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    create("c", str(tmp_path / "x" / "one"))
    assert "is a copy of one: it" in caplog.text


@pytest.mark.parametrize("name", [".", "..", "a/../b"])
def test_artifacts_lie_below_mlruns_whatever_an_experiment_is_called(
    store: str, tmp_path: Path, name: str
) -> None:
    run_id = create_parent(tmp_path / "run", store, name, "run")
    artifacts = Path(client_of(store).get_run(run_id).info.artifact_uri)
    above = Path(store.removeprefix("sqlite:///")).parent / "mlruns"
    assert artifacts.resolve().parent.parent.parent == above.resolve()


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "file:///tmp/mlruns", ""])
def test_folders_as_stores_are_refused_in_words(uri: str, run_dir: Path) -> None:
    with pytest.raises(ValueError, match="wanted sqlite:///FILE, http"):
        started_tracker(run_dir, uri)


def test_a_relative_database_stays_where_it_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///a.db") == f"sqlite:///{tmp_path}/a.db"
    assert absolute_uri("sqlite:////b/a.db") == "sqlite:////b/a.db"
    assert absolute_uri("http://host:5000") == "http://host:5000"


def test_a_sweep_into_a_deleted_experiment_is_told_what_to_do(
    empty_store: Path, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    uri = copied(empty_store, tmp_path)
    client = MlflowClient(uri)
    number = client.create_experiment("gone")
    client.delete_experiment(number)
    message = (
        "^tracking.experiment: found 'gone', which is deleted in MLflow; wanted another name, or "
        f"first: .* mlflow experiments restore -x {number}$"
    )
    with pytest.raises(RuntimeError, match=message):
        create_parent(tmp_path / "a-sweep", uri, "gone", "a-sweep")
    client.restore_experiment(number)
    run_id = create_parent(tmp_path / "a-sweep", uri, "gone", "a-sweep")
    client.delete_run(run_id)
    with pytest.raises(RuntimeError, match=f"^run {run_id} is deleted in MLflow; restore it there"):
        create_parent(tmp_path / "a-sweep", uri, "gone", "a-sweep")


def test_a_server_that_is_away_is_named_with_the_whole_reason(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://me:secret@127.0.0.1:{port}"
    with pytest.raises(RuntimeError) as raised:
        create_parent(tmp_path / "a-sweep", uri, "tests", "a-sweep")
    address = f"http://***@127.0.0.1:{port}"
    assert str(raised.value) == f"tracking.uri: {address} cannot be reached: Connection refused"
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_that_another_process_makes_meanwhile_is_used(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    create_parent(tmp_path / "a", store, "made meanwhile", "a")
    found, answers = MlflowClient.get_experiment_by_name, iter([None, None])

    def look(client: MlflowClient, name: str) -> Any:
        return next(answers, found(client, name))

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look)
    (tmp_path / "b").mkdir()
    create_parent(tmp_path / "b", store, "made meanwhile", "b")
    experiment = found(MlflowClient(store), "made meanwhile")
    assert experiment is not None
    runs = MlflowClient(store).search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"a", "b"}


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm", "-mj0123ABCD"])
@pytest.mark.parametrize("has_database", [True, False])
def test_an_unnamed_database_with_a_journal_is_not_opened(
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    has_database: bool,
) -> None:
    uri = copied(empty_store, tmp_path)
    if not has_database:
        (tmp_path / "mlflow.db").unlink()
    journal = tmp_path / f"mlflow.db{ending}"
    journal.touch()
    message = f"^found mlflow.db{ending}, as after a crash, wanted mlflow.db alone; if you trust"
    with pytest.raises(RuntimeError, match=message):
        create_parent(tmp_path / "run", uri, "tests", "run")
    assert journal.exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    if has_database and ending == "-journal":  # the user has named it
        create_parent(tmp_path / "run", uri, "tests", "run")


def test_a_database_that_a_crash_left_is_told_what_to_do(
    empty_store: Path, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = copied(empty_store, tmp_path)
    (tmp_path / "mlflow.db-journal").touch()
    tracker = started_tracker(run_dir, uri)
    tracker.log("train", 1, {"loss": 1.0})
    assert not tracker.finish("KILLED", timeout_s=1)
    assert "open it once with `mlflow ui`, or set MLFLOW_TRACKING_URI to it" in caplog.text
    assert '"loss": 1.0' in (run_dir / "logs" / "metrics.jsonl").read_text()


def test_an_unnamed_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.db", tmp_path / "other.db"
    for file in (path, other):
        with sqlite3.connect(file) as database:
            database.execute("CREATE TABLE runs (a)")
            database.execute("CREATE TABLE experiments (a)")
        database.close()
    content = path.read_bytes()
    (tmp_path / "link.db").symlink_to(other)
    (tmp_path / "text.db").write_text("text")
    for name, message in (
        ("mine.db", "^found mine.db without MLflow's tables"),
        ("text.db", "^found text.db without MLflow's tables"),
        ("link.db", "^found link.db, which is no regular file"),
        ("mine.db?a=.db", "wanted a database without [?] in its name"),
    ):
        with pytest.raises(RuntimeError, match=message):
            create_parent(tmp_path / "run", f"sqlite:///{tmp_path}/{name}", "tests", "run")
    assert path.read_bytes() == other.read_bytes() == content


def test_sqlite_does_not_open_what_is_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(sqlite3, "connect", lambda *_: pytest.fail("opened"))
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        check_readable(tmp_path / "notes.txt")


def test_a_named_file_that_is_no_database_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.db"
    path.write_text("text, longer than the head of a database that SQLite would look at")
    uri = f"sqlite:///{path}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RuntimeError, match=f"{uri} cannot be reached: DatabaseError: file is not"):
        create_parent(tmp_path / "run", uri, "tests", "run")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RuntimeError, match=r"text.db: found a FIFO, wanted a regular file"):
        create_parent(tmp_path / "run", uri, "tests", "run")


def test_an_unnamed_database_that_was_closed_is_used_whatever_its_journal_mode(
    empty_store: Path, tmp_path: Path
) -> None:
    uri = copied(empty_store, tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("PRAGMA journal_mode = WAL")
    database.close()
    run_id = create_parent(tmp_path / "run", uri, "tests", "run")
    assert client_of(uri).get_run(run_id).info.run_name == "run"


@pytest.mark.parametrize("is_named", [True, False])
def test_what_waiting_does_not_mend_is_not_waited_for(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    path = tmp_path / "text.db"
    path.write_text("text")
    uri = f"sqlite:///{path}"
    if is_named:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = started_tracker(run_dir, uri)
    start = time.monotonic()
    assert not tracker.finish("FINISHED", timeout_s=600)
    assert time.monotonic() - start < 300  # the machine may be busy
