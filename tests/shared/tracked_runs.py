"""Trackers of small runs, and what MLflow has of them."""

import shutil
from pathlib import Path
from typing import Any

from longhaul.pipeline.tracking.tracker import Tracker


def copied(empty_store: Path, folder: Path) -> str:
    shutil.copy(empty_store, folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


def started_tracker(run_dir: Path, uri: str, **options: Any) -> Tracker:
    tracker = Tracker(run_dir, uri=uri, experiment="tests", run_name=run_dir.name, **options)
    tracker.start()
    return tracker


def client_of(uri: str) -> Any:
    from mlflow.tracking import MlflowClient  # More than a second, which not every test needs.

    return MlflowClient(uri)


def mlflow_run(uri: str, run_dir: Path) -> Any:
    return client_of(uri).get_run((run_dir / "mlflow_run_id").read_text().strip())


def history(uri: str, run_dir: Path, name: str) -> list[tuple[int, float]]:
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    return [(m.step, m.value) for m in client_of(uri).get_metric_history(run_id, name)]
