"""What a user drops into the folder of a running training never ends it."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.checkpoints.folders import newest_checkpoint
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint

DROPPING = Path(__file__).with_name("dropped_files.py")
UPDATES = 40

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(run.path / "small" / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{UPDATES:09d}"
    return SavedCheckpoint(newest, "model").read_group("model")


def test_the_table_in_the_docs_names_what_is_tried() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    table = page.partition("## What a file in a running run's folder does")[2].partition("\n## ")[0]
    names = runpy.run_path(str(DROPPING))["NAMES"]
    assert len(names) > 20
    for name in names:
        if "notes" not in name and ".damaged" not in name:
            wanted = re.sub(r"step-\S+", "step-", name.replace("rank-0", "rank-N"))
            wanted = re.sub(r"(\.saving|\.removing)-.*", r"\1-", wanted)
            assert wanted.removesuffix("/train/manifest.json") in table, name


@pytest.mark.wide
def test_nothing_that_is_dropped_into_a_run_folder_ends_the_training(
    make_run: Any, fork: Any, tmp_path: Path
) -> None:
    run, undisturbed = make_run(UPDATES), make_run(UPDATES)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    code = f"import runpy; runpy.run_path({str(DROPPING)!r}, run_name='__main__')"
    # Evaluations read the run's own config and manifest again.
    overrides = ["evaluation.tasks=[perplexity]", "evaluation.every_tokens=2048"]
    process = fork(code, run.path, "small.yaml", str(outside), *overrides)
    out, error = process.communicate()
    assert process.returncode == 0, f"{out}\n{error}"
    undisturbed.longhaul("train", "small.yaml")
    assert outside.read_text() == "precious"
    found, wanted = weights(run), weights(undisturbed)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    folder = run.path / "small"
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [e["step"] for e in entries if e["kind"] == "train"] == list(range(1, UPDATES + 1))
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "curves/train_loss")
    assert sorted(point.step for point in history) == list(range(1, UPDATES + 1))
    for name in ("STOP", "SAVE"):
        for what in ("a FIFO", "a folder", "a link", "a socket"):
            assert f"{name}: found {what}, wanted a regular file; it is ignored" in error
    assert "Traceback" not in error
    assert not list(folder.rglob(".saving-*"))
