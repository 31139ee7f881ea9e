"""Which run of MLflow a run folder has, wherever the folder and the store are."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tracked_runs import copied, history, started_tracker

from longhaul.pipeline.tracking.mlflow_run import absolute_uri, create_parent

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
