"""The tracker against a real sqlite store; test_server.py has it against a real server."""

import json
import logging
import math
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import client_of, copied, history, mlflow_run, started_tracker

from longhaul.datamodules.named import remember
from longhaul.pipeline.tracking import tracker as tracker_module
from longhaul.pipeline.tracking.metrics_journal import Dataset, JournalError, read_lines
from longhaul.pipeline.tracking.mlflow_run import load_mlflow
from longhaul.pipeline.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("quick")


def test_importing_and_constructing_does_not_import_mlflow(run_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from longhaul.pipeline.tracking.tracker import Tracker\n"
        "Tracker(Path(sys.argv[1]), uri='sqlite:///x.db', experiment='e', run_name='n')\n"
        "assert 'mlflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(run_dir)], check=True, cwd=run_dir)


@pytest.mark.parametrize("logs", [True, False])
def test_the_first_upload_waits_for_a_value_or_the_end(
    run_dir: Path, store: str, quick: None, monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    monkeypatch.setattr(tracker_module, "FIRST_UPLOAD_S", 600)
    tracker = started_tracker(run_dir, store)
    time.sleep(0.2)
    assert tracker.run_id is None
    if logs:
        tracker.log("train", 1, {"loss": 1.0})
        deadline = time.monotonic() + 60
        while tracker.run_id is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert tracker.finish("FINISHED", timeout_s=60)
    assert mlflow_run(store, run_dir).info.status == "FINISHED"


def test_everything_logged_is_in_mlflow_after_finish(store: str, run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("name: x\n")
    (run_dir / "figures").mkdir()
    (run_dir / "figures" / "positions.csv").write_text("1\n")
    tracker = started_tracker(
        run_dir,
        store,
        params={"optim.lr": "0.1", "long": "x" * 9000, **{f"p{i}": "1" for i in range(250)}},
        tags={"commit": "abc", "long": "y" * 9000},
        artifacts=[run_dir / "config.yaml"],
    )
    for step in range(1, 31):
        values = {f"train/metric{i}": step + i / 100 for i in range(97)}
        tracker.log("train", step, values)
    tracker.log("train", 31, {"loss@8": math.nan, "big": math.inf})
    tracker.log("validation", 31, {f"validation/position_{i}": float(i) for i in range(1500)})
    tracker.log_artifact(run_dir / "figures" / "positions.csv", "figures")
    assert tracker.finish("FINISHED", timeout_s=60)

    run = mlflow_run(store, run_dir)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["optim.lr"] == "0.1"
    assert len(run.data.params) == 252
    assert run.data.params["long"] == "x" * 5997 + "..."
    assert run.data.tags["commit"] == "abc"
    assert len(run.data.tags["long"]) == 8000
    for i in (0, 96):
        expected = [(step, step + i / 100) for step in range(1, 31)]
        assert history(store, run_dir, f"train/metric{i}") == expected
    ((step, value),) = history(store, run_dir, "loss_8")
    assert step == 31
    assert math.isnan(value)
    for i in (0, 999, 1000, 1499):
        assert history(store, run_dir, f"validation/position_{i}") == [(31, float(i))]
    client = client_of(store)
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["config.yaml", "figures"]
    assert run.info.artifact_uri.startswith(store.removeprefix("sqlite:///").rsplit("/", 1)[0])


def test_no_request_notes_a_position_that_its_metrics_have_not_reached(
    store: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # Slow to import.

    real = SqlAlchemyStore.log_batch
    sent: Counter[int] = Counter()
    sizes = {1: 900, 2: 899, 3: 1, 4: 1000, 5: 1901, 6: 450, 7: 450}
    noted: list[int] = []
    missing: list[int] = []

    def spy(self: Any, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        real(self, run_id, metrics, params, tags)
        sent.update(metric.step for metric in metrics if metric.key.startswith("v"))
        for tag in tags:
            if tag.key == "longhaul.uploaded.metrics" and "train" in json.loads(tag.value):
                noted.append(json.loads(tag.value)["train"])
                missing.extend(s for s in range(1, noted[-1] + 1) if sent[s] != sizes[s])

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", spy)
    tracker = Tracker(run_dir, uri=store, experiment="tests", run_name="x")
    for step, size in sizes.items():
        tracker.log("train", step, {f"v{i}": 1.0 for i in range(size)})
    tracker.start()
    assert tracker.finish("FINISHED", timeout_s=60)
    assert list(dict.fromkeys(noted)) == [1, 3, 4, 5, 7]
    assert missing == []


def test_the_machines_load_is_logged_while_training(store: str, run_dir: Path) -> None:
    tracker = started_tracker(run_dir, store)
    journal = run_dir / "logs" / "metrics.jsonl"
    for _ in range(300):
        if any(line["kind"] == "system" for line in read_lines(journal)[0]):
            break
        time.sleep(0.1)
    assert tracker.finish("FINISHED", timeout_s=30)
    ((step, percentage),) = history(store, run_dir, "system/system_memory_usage_percentage")
    assert step == 0
    assert 0 < percentage < 100


def test_a_resumed_run_is_running_again_and_ends_truthfully(store: str, run_dir: Path) -> None:
    started_tracker(run_dir, store).finish("KILLED", timeout_s=30)
    assert mlflow_run(store, run_dir).info.status == "KILLED"
    tracker = started_tracker(run_dir, store)
    for _ in range(300):
        if mlflow_run(store, run_dir).info.status == "RUNNING":
            break
        time.sleep(0.05)
    else:
        pytest.fail("never RUNNING again")
    assert tracker.run_id == (run_dir / "mlflow_run_id").read_text().strip()
    tracker.finish("FAILED", timeout_s=30)
    assert mlflow_run(store, run_dir).info.status == "FAILED"


def test_a_changed_param_becomes_a_tag_that_follows_the_value(store: str, run_dir: Path) -> None:
    for lr, tag in (("0.1", None), ("0.2", "0.2"), ("0.2", "0.2"), ("0.1", "0.1")):
        tracker = started_tracker(run_dir, store, params={"lr": lr, "same": "1"})
        assert tracker.finish(None, timeout_s=30)
        data = mlflow_run(store, run_dir).data
        assert data.params == {"lr": "0.1", "same": "1"}
        assert data.tags.get("config_changed.lr") == tag
        assert "config_changed.same" not in data.tags
    tracker = started_tracker(run_dir, store, params={"lr": "0.1", "new": "7"})
    assert tracker.finish(None, timeout_s=30)
    assert mlflow_run(store, run_dir).data.params["new"] == "7"


def test_the_newest_checkpoint_is_a_tag_and_its_measurements_are_metrics(
    store: str, run_dir: Path
) -> None:
    checkpoint = run_dir / "checkpoints" / "step-000000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    tracker = started_tracker(run_dir, store)
    tracker.log_checkpoint(checkpoint.with_name("step-000000003"), 3)
    tracker.log_checkpoint(checkpoint, 7)
    tracker.finish("FINISHED", timeout_s=30)
    evaluation = started_tracker(run_dir, store, is_training=False)
    older = checkpoint.with_name("step-000000003")
    evaluation.log_checkpoint(older, 3, {"evaluation/loss": 2.5, "evaluation/odd": math.nan})
    assert evaluation.finish(None, timeout_s=30)

    run = mlflow_run(store, run_dir)
    assert run.info.status == "FINISHED"
    assert run.data.tags["longhaul.checkpoint"] == "checkpoints/step-000000007"
    assert history(store, run_dir, "evaluation/loss") == [(3, 2.5)]
    copied = Path(run.info.artifact_uri).rglob("*.safetensors")
    assert list(copied) == []


def test_the_pages_of_a_run_are_filled(store: str, run_dir: Path) -> None:
    described = {"mlflow.source.name": "longhaul train", "mlflow.note.content": "softmax"}
    datasets = [
        Dataset("book/train", "abc", "local", '{"uri": "/book"}', '{"num_tokens": 5}', "training"),
        Dataset("book/validation", "def", "local", "{}", "{}", "validation"),
    ]

    def log(note: str, sets: list[Dataset]) -> Any:
        tags = described | {"mlflow.note.content": note}
        tracker = started_tracker(run_dir, store, tags=tags, datasets=sets)
        tracker.log("train", 1, {"loss": 1.0})
        assert tracker.finish("FINISHED", timeout_s=30)
        return mlflow_run(store, run_dir)

    for _ in range(2):  # as when the run is resumed
        run = log("softmax", datasets)
        assert {
            (one.dataset.name, one.dataset.digest, one.tags[0].value)
            for one in run.inputs.dataset_inputs
        } == {("book/train", "abc", "training"), ("book/validation", "def", "validation")}
        assert described.items() <= run.data.tags.items()
    own = [name for name in run.data.tags if not name.startswith("mlflow.")]
    assert sorted(own) == ["longhaul.run_key", "longhaul.uploaded.metrics"]
    experiment = client_of(store).get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    client_of(store).set_tag(run.info.run_id, "mlflow.note.content", "my best run")
    run = log("softmax, longer", datasets[:1])
    assert run.data.tags["mlflow.note.content"] == "my best run"
    assert len(run.inputs.dataset_inputs) == 2


def test_a_damaged_note_of_positions_sends_everything_again_and_once(
    store: str, run_dir: Path
) -> None:
    for step, text in enumerate(("", "[1]", "{", '{"train": "9", "status": true}', '{"train": 4}')):
        tracker = started_tracker(run_dir, store)
        tracker.log("train", step, {"loss": float(step)})
        assert tracker.finish("FINISHED", timeout_s=30)
        assert history(store, run_dir, "loss") == [(n, float(n)) for n in range(step + 1)]
        run_id = mlflow_run(store, run_dir).info.run_id
        client_of(store).set_tag(run_id, "longhaul.uploaded.metrics", text)


FULL_STORE = """
import logging, resource, sys, time
from pathlib import Path
from longhaul.pipeline.tracking import tracker
from longhaul.pipeline.tracking.tracker import Tracker

logging.basicConfig(format="longhaul: %(message)s", level=logging.INFO)
tracker.UPLOAD_EVERY_S = tracker.MAX_BACKOFF_S = 0.05
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
one = Tracker(Path(sys.argv[1]), uri=sys.argv[2], experiment="tests", run_name="full")
one.start()
for step in range(20):
    one.log("train", step, {"loss": 1.0})
while one._failure is None:
    time.sleep(0.05)
print(one.finish("FINISHED", timeout_s=0.5))
"""


@pytest.mark.wide
def test_a_full_database_is_one_line_and_one_at_the_end(
    empty_store: Path, run_dir: Path, tmp_path: Path
) -> None:
    uri = copied(empty_store, tmp_path)
    remember([uri])  # as `train` does; the full disk leaves a journal beside the database
    assert (tmp_path / "mlflow.db").stat().st_size > 200_000
    result = subprocess.run(
        [sys.executable, "-c", FULL_STORE, str(run_dir), uri],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.stdout == "False\n", result.stderr
    first, last = result.stderr.splitlines()
    assert "does not take metrics; they are kept in" in first
    assert "disk" in first
    assert "SQL:" not in first
    assert re.match(r"longhaul: \d+ lines of .* are not in MLflow at sqlite:", last)
    assert "once it takes them again, the same command sends them" in last
    assert started_tracker(run_dir, uri).finish("FINISHED", timeout_s=30)
    assert history(uri, run_dir, "loss") == [(step, 1.0) for step in range(20)]


def test_an_evaluation_works_beside_a_training_process(
    store: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient  # Slow to import.

    real = MlflowClient.create_run

    def slow(*args: Any, **rest: Any) -> Any:
        time.sleep(0.3)  # so that both find no run before either has made one
        return real(*args, **rest)

    monkeypatch.setattr(MlflowClient, "create_run", slow)
    training = started_tracker(run_dir, store)
    evaluation = started_tracker(run_dir, store, is_training=False)
    training.log("train", 1, {"loss": 1.0})
    (run_dir / "a.csv").write_text("1")
    evaluation.log_artifact(run_dir / "a.csv")
    assert evaluation.finish(None, timeout_s=30)
    training.log_artifact(run_dir / "a.csv", "second")
    assert training.finish("FINISHED", timeout_s=30)
    run_id = mlflow_run(store, run_dir).info.run_id
    paths = [artifact.path for artifact in client_of(store).list_artifacts(run_id)]
    assert paths == ["a.csv", "second"]


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    store: str, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException  # Slow to import.
    from mlflow.tracking import MlflowClient

    real = MlflowClient.log_batch

    def picky(self: Any, run_id: str, metrics: Any = (), *args: Any, **rest: Any) -> None:
        if any(metric.key == "poison" for metric in metrics):
            raise MlflowException.invalid_parameter_value("poison")
        real(self, run_id, metrics, *args, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", picky)
    (run_dir / "a.csv").write_text("1")
    tracker = Tracker(run_dir, uri=store, experiment="tests", run_name="x")
    for step, name in enumerate(["loss", "loss", "poison", "loss"]):
        tracker.log("train", step, {name: float(step)})
    tracker.log_artifact(run_dir / "a.csv", "../outside")
    tracker.log_artifact(run_dir / "never-written.csv")
    tracker.log("train", 4, {"loss": 4.0})
    with caplog.at_level(logging.WARNING):
        tracker.start()
        assert tracker.finish("FINISHED", timeout_s=30)
    assert history(store, run_dir, "loss") == [(step, float(step)) for step in (0, 1, 3, 4)]
    assert mlflow_run(store, run_dir).info.status == "FINISHED"
    about = [message for message in caplog.messages if "refused line" in message]
    assert ["train 2" in about[0], "artifact 1" in about[1], len(about)] == [True, True, 2]
    assert any("never-written.csv" in message for message in caplog.messages)


def test_an_artifact_store_that_fails_does_not_hold_up_the_rest_for_ever(
    store: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient  # Slow to import.

    def fail(*_: Any) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    (run_dir / "a.csv").write_text("1")
    tracker = started_tracker(run_dir, store, artifacts=[run_dir / "a.csv"])
    tracker.log("train", 1, {"loss": 1.0})
    assert tracker.finish("FINISHED", timeout_s=30)
    assert history(store, run_dir, "loss") == [(1, 1.0)]


def test_a_deleted_run_is_waited_for_and_loses_nothing(
    store: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert started_tracker(run_dir, store).finish(None, timeout_s=30)
    client = client_of(store)
    run_id = mlflow_run(store, run_dir).info.run_id
    client.delete_run(run_id)
    tracker = started_tracker(run_dir, store)
    tracker.log("train", 1, {"loss": 1.0})
    assert not tracker.finish(None, timeout_s=0.5)
    assert any("restore it there" in message for message in caplog.messages)
    client.restore_run(run_id)
    assert started_tracker(run_dir, store).finish(None, timeout_s=30)
    assert history(store, run_dir, "loss") == [(1, 1.0)]


def test_a_run_that_vanishes_is_made_again_with_its_whole_history(
    empty_store: Path, run_dir: Path, tmp_path: Path
) -> None:
    uri = copied(empty_store, tmp_path)
    tracker = started_tracker(run_dir, uri)
    tracker.log("train", 1, {"loss": 1.0})
    for _ in range(600):
        if tracker.run_id and history(uri, run_dir, "loss"):
            break
        time.sleep(0.05)
    first = tracker.run_id
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"delete from {table} where run_uuid = ?", (first,))
    tracker.log("train", 2, {"loss": 2.0})
    assert tracker.finish("FINISHED", timeout_s=30)
    assert tracker.run_id != first
    assert history(uri, run_dir, "loss") == [(1, 1.0), (2, 2.0)]


def test_a_store_that_cannot_be_reached_is_one_warning_and_no_error(
    empty_store: Path, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").write_text("a file where the database's folder should be")
    uri = f"sqlite:///{tmp_path}/place/mlflow.db"
    tracker = started_tracker(run_dir, uri)
    tracker.log("train", 1, {"loss": 1.0})
    assert tracker.run_id is None
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert not tracker.finish("FINISHED", timeout_s=1.5)
    assert time.monotonic() - began < 5
    about = [message for message in caplog.messages if "does not take metrics" in message]
    assert len(about) == 1
    assert str(tmp_path / "place") in about[0]
    assert "the same command sends them" in caplog.messages[-1]
    (tmp_path / "place").unlink()
    (tmp_path / "place").mkdir()
    copied(empty_store, tmp_path / "place")
    assert started_tracker(run_dir, uri).finish(None, timeout_s=30)
    assert history(uri, run_dir, "loss") == [(1, 1.0)]
    assert mlflow_run(uri, run_dir).info.status == "RUNNING"


def test_a_slow_upload_is_waited_for_by_a_finished_run_and_not_by_a_stop(
    store: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(uri: str) -> None:
        time.sleep(0.5)  # as an import on a busy machine
        load_mlflow(uri)

    monkeypatch.setattr("longhaul.pipeline.tracking.tracker.load_mlflow", load)
    tracker = started_tracker(run_dir, store)
    tracker.log("train", 1, {"loss": 1.0})
    assert not tracker.finish("KILLED", timeout_s=0.05)
    tracker = started_tracker(run_dir, store)
    assert tracker.finish("FINISHED", timeout_s=0.05)
    assert mlflow_run(store, run_dir).info.status == "FINISHED"


def test_a_second_training_process_is_refused(run_dir: Path, store: str) -> None:
    held = (
        "import pathlib, sys, time\n"
        "from longhaul.pipeline.tracking.metrics_journal import Journal\n"
        "j = Journal(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    journal = run_dir / "logs" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", held, str(journal)], stdout=subprocess.PIPE, cwd=run_dir
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(JournalError, match="another process"):
            started_tracker(run_dir, store)
    finally:
        process.kill()
        process.wait()


def test_only_what_lies_below_the_run_folder_is_sent(
    store: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "elsewhere" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("secret")
    (run_dir / "own.txt").write_text("own")
    (run_dir / "folder" / "below").mkdir(parents=True)
    (run_dir / "folder" / "below" / "own.txt").write_text("own")
    (run_dir / "link.txt").symlink_to(secret)
    (run_dir / "linked").symlink_to(secret.parent)
    (run_dir / "folder" / "link.txt").symlink_to(secret)
    (run_dir / "folder" / "linked").symlink_to(secret.parent)
    tracker = started_tracker(run_dir, store)
    for name in ("own.txt", "folder", "link.txt", "linked", "linked/secret.txt"):
        tracker.log_artifact(run_dir / name, "sent")
    assert tracker.finish("FINISHED", timeout_s=60)
    sent = Path(mlflow_run(store, run_dir).info.artifact_uri) / "sent"
    found = {str(path.relative_to(sent)) for path in sent.rglob("*") if path.is_file()}
    assert found == {"own.txt", "below/own.txt"}
    assert sum("wanted a path below the folder" in line for line in caplog.messages) == 3


def test_a_database_that_nobody_named_stores_artifacts_beside_itself_alone(
    store: str, run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "a.csv").write_text("1")
    tracker = started_tracker(run_dir, store)
    assert tracker.finish("FINISHED", timeout_s=60)
    (tmp_path / "home").mkdir(exist_ok=True)
    with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
        database.execute("UPDATE runs SET artifact_uri = ?", (str(tmp_path / "home"),))
    evaluation = Tracker(run_dir, uri=store, experiment="tests", run_name="run", is_training=False)
    evaluation.log_artifact(run_dir / "a.csv")
    evaluation.start()
    evaluation.finish(None, timeout_s=10)
    assert not list((tmp_path / "home").iterdir())
