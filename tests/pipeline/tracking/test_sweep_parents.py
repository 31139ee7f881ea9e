"""The parent run of a sweep in MLflow, whose pages fold the sweep's runs below it."""

import math
from pathlib import Path

import pytest
from tracked_runs import client_of, history, mlflow_run, started_tracker

from longhaul.pipeline.tracking.mlflow_mirror import PARENT_TAG
from longhaul.pipeline.tracking.mlflow_run import create_parent

pytestmark = pytest.mark.usefixtures("quick")


def test_a_sweeps_parent_has_the_best_and_last_losses_of_its_runs(
    store: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent_dir, other_dir = tmp_path / "sweep", tmp_path / "kind=zeros"
    parent_dir.mkdir()
    other_dir.mkdir()
    parent = create_parent(parent_dir, store, "tests", "sweep")
    tracker = started_tracker(run_dir, store, tags={PARENT_TAG: parent})
    for step, loss in enumerate((3.0, 2.0, math.nan, 2.5), start=1):
        tracker.log("train", step, {"curves/train_loss": 0.1})
        tracker.log("validation", step, {"curves/validation_loss": loss})
    assert tracker.finish("KILLED", timeout_s=60)
    tracker = started_tracker(run_dir, store, tags={PARENT_TAG: parent})  # sends all of it again
    assert tracker.finish("FINISHED", timeout_s=60)
    tracker = started_tracker(other_dir, store, tags={PARENT_TAG: parent})
    for step, loss in enumerate((5.0, 4.0, 4.5), start=1):
        tracker.log("train", step, {"curves/train_loss": loss})  # and no validation
    assert tracker.finish("FINISHED", timeout_s=60)

    assert history(store, parent_dir, "best/run") == [(1, 3.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    last = history(store, parent_dir, "last/run")
    assert [step for step, _ in last] == [1, 2, 3, 4]
    assert last[3][1] == 2.5
    assert math.isnan(last[2][1])
    assert history(store, parent_dir, "best/kind_zeros") == [(3, 4.0)]
    assert history(store, parent_dir, "last/kind_zeros") == [(3, 4.5)]


def test_a_deleted_parent_stops_no_upload(
    store: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent_dir = tmp_path / "sweep"
    parent_dir.mkdir()
    parent = create_parent(parent_dir, store, "tests", "sweep")
    client_of(store).delete_run(parent)
    tracker = started_tracker(run_dir, store, tags={PARENT_TAG: parent})
    tracker.log("validation", 1, {"curves/validation_loss": 3.0})
    tracker.log("validation", 2, {"curves/validation_loss": 2.0})
    assert tracker.finish("FINISHED", timeout_s=60)
    assert history(store, run_dir, "curves/validation_loss") == [(1, 3.0), (2, 2.0)]
    assert caplog.text.count("MLflow refused losses for the parent run") == 1


@pytest.mark.parametrize("which", ["no run of longhaul's", "in another experiment", "missing"])
def test_a_parent_that_is_no_sweeps_gets_nothing(
    store: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    client = client_of(store)
    if which == "in another experiment":
        parent = create_parent(tmp_path / "sweep", store, "other", "sweep")
    elif which == "missing":
        parent = "0" * 32
    else:
        create_parent(tmp_path / "first", store, "tests", "first")  # so that there is "tests"
        experiment = client.get_experiment_by_name("tests")
        parent = client.create_run(experiment.experiment_id).info.run_id
    for _ in range(2):
        tracker = started_tracker(run_dir, store, tags={PARENT_TAG: parent, "a": "b"})
        tracker.log("validation", 1, {"curves/validation_loss": 3.0})
        assert tracker.finish("FINISHED", timeout_s=60)
    assert caplog.text.count("tracking.parent_run_id is ignored") == 2
    tags = mlflow_run(store, run_dir).data.tags
    assert PARENT_TAG not in tags
    assert tags["a"] == "b"
    if which != "missing":
        assert client.get_run(parent).data.metrics == {}
