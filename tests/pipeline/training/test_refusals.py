"""Commands that are refused change nothing: neither the run folder nor what MLflow has of it."""

import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from longhaul.configs import ConfigError, load_run_config
from longhaul.pipeline.cli import main
from longhaul.pipeline.runs.data import check_run

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

# What holds a lock on the journal of a run, as the process that trains it does.
TRAINS = """
import sys, time
from pathlib import Path
from longhaul.pipeline.tracking.metrics_journal import Journal
journal = Journal(Path("small/logs/metrics.jsonl"))
Path("locked").touch()
time.sleep(600)
"""

# Arguments, and a part of the line with which they are refused. {corpus} has train and validation.
OTHER_RUNS = (
    ("optim.learning_rate=1", "optim.learning_rate: found 1.0, wanted 0.003 as in"),
    ("trainer.seed=1", "trainer.seed: found 1, wanted 0 as in"),
    ("trainer.precision=bf16-mixed", "trainer.precision: found 'bf16-mixed'"),
    ("model.width=64", "model.width: found 64, wanted 32 as in"),
    ("model.attention.kind=softmax", "model.attention.kind: found 'softmax', wanted 'conformal_"),
    ("data.context=32", "data.context: found 32, wanted 64 as in"),
    ("data.validation_tokens=128", "data.validation_tokens: found 128, wanted 384 as in"),
    ("data.validation_manifest=null", "data.validation_manifest: found null, wanted"),
    ("data.validation_manifest={corpus}/train", "data.validation_manifest: found other shards in"),
    ("data.manifest={corpus}/validation", "data.manifest: found other shards in"),
    ("data.manifest={corpus}", "manifest.json: no such manifest; wanted {corpus}/train or"),
    ("data.manifest=nowhere", "data.manifest: "),
    ("trainer.start_from=small", "trainer.start_from: found "),
    ("optim.lr=1", "optim.lr: unknown key"),
    ("model.vocabulary=128", "model.vocabulary: found 128"),
    ("model.layers=12 model.width=1000000", "gradients and moments take"),
    ("trainer.strategy=ddp trainer.nodes=2 trainer.micro_batch=2", "found 2 outside of a Slurm"),
    ("evaluation.tasks=[nonsense]", "evaluation.tasks: "),
    ("root=small.yaml", "root: found small.yaml, in which no folder can be made, wanted one for"),
    (
        "trainer.strategy=ddp trainer.devices=2 trainer.micro_batch=2 optim.learning_rate=1",
        "optim.learning_rate: found 1.0",
    ),
    # As a user would who goes on with a run, and mixes up the data.
    ("trainer.max_tokens=20480 data.manifest={corpus}/validation", "data.manifest: found other"),
)
OTHER_COMMANDS = (
    ("train nowhere.yaml", "config: found no file nowhere.yaml"),
    ("evaluate small --tasks nonsense", "--tasks: "),
    ("evaluate small --data nowhere", "--data: found no manifest.json in nowhere"),
    ("evaluate small --devices 0", "--devices: found 0"),
    ("evaluate small --text nowhere.txt", "--text: found no file nowhere.txt"),
    ("generate small --state nowhere --tokens 1", "--state: found nowhere"),
    ("generate small --positions linear --prompt x", "--factor: found none"),
    ("export small small", "wanted a new or empty folder"),
    ("report nonsense page --uri sqlite:///mlflow.db", "nonsense"),
)


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files, and of the rows of all tables of the database."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("mlflow.db"):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    with sqlite3.connect(f"file:{folder}/mlflow.db?mode=ro", uri=True) as database:
        dump = "\n".join(database.iterdump())
    return found | {"mlflow.db": hashlib.sha256(dump.encode()).hexdigest()}


@pytest.fixture
def refuse(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Run], int]:
    """Gives every command to a run, and returns how many were refused without a trace."""

    def each(run: Run) -> int:
        monkeypatch.chdir(run.path)
        commands = [
            *(("train", "small.yaml", *options.split(), said) for options, said in OTHER_RUNS),
            *((*command.split(), said) for command, said in OTHER_COMMANDS),
        ]
        before = contents(run.path)
        for command in commands:
            *arguments, said = (part.format(corpus=corpus) for part in command)
            status, error = main(arguments), capsys.readouterr().err
            assert status == 2, (arguments, error)
            assert said in error.splitlines()[-1], arguments
            assert contents(run.path) == before, arguments
        return len(commands)

    return each


def test_what_is_refused_leaves_a_finished_run_as_it_was(
    uninterrupted: Run, refuse: Callable[[Run], int]
) -> None:
    assert (uninterrupted.path / "small" / "DONE").is_file()
    assert refuse(uninterrupted) > 20


@pytest.mark.parametrize("is_done", [True, False])
def test_a_budget_below_what_is_trained_is_refused(
    uninterrupted: Run, tmp_path: Path, is_done: bool
) -> None:
    shutil.copytree(uninterrupted.path / "small", tmp_path / "small")
    if not is_done:
        (tmp_path / "small" / "DONE").unlink()  # as in a run that trains further
    for tokens, is_refused in ((14848, True), (15000, False), (30720, False)):
        overrides = [f"root={tmp_path}", f"trainer.max_tokens={tokens}"]
        config = load_run_config(uninterrupted.path / "small.yaml", overrides)
        said = rf"trainer\.max_tokens: found {tokens}, wanted 15360 or more, which .*small has"
        with pytest.raises(ConfigError, match=said) if is_refused else nullcontext():
            check_run(config)


@pytest.mark.wide
def test_what_is_refused_leaves_a_running_run_as_it_was(
    run: Run, refuse: Callable[[Run], int], fork: Callable[..., Any]
) -> None:
    (run.path / "small").mkdir()
    (run.path / "small" / "STOP").touch()  # after its first update
    assert run.longhaul("train", "small.yaml", check=False).returncode == 75
    trains = fork(TRAINS, run.path)
    try:
        while not (run.path / "locked").exists():
            assert trains.poll() is None, trains.communicate()
        assert refuse(run) > 20
        before = contents(run.path)
        assert main(["train", "small.yaml"]) == 73
        assert contents(run.path) == before
    finally:
        trains.send_signal(9)
        trains.end()
