"""What the config of someone else's run may not bring about."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from longhaul.configs import ConfigError
from longhaul.pipeline.cli import main
from longhaul.pipeline.runs.folder import RunFolder, load_run

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture
def foreign(uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of someone else's, on the machine of a user who has named nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(uninterrupted.path / "small", tmp_path / "runs" / "foreign")
    shutil.copy(uninterrupted.path / "mlflow.db", tmp_path / "runs" / "mlflow.db")
    return tmp_path / "runs" / "foreign"


def change(run: Path, key: str, value: Any) -> None:
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    file.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("key", ["data.manifest", "data.validation_manifest"])
@pytest.mark.parametrize("location", ["pipe:touch PWNED; cat", "http://127.0.0.1:9"])
def test_no_command_runs_and_no_host_is_asked_that_only_the_config_names(
    foreign: Path, corpus: Path, capsys: pytest.CaptureFixture[str], key: str, location: str
) -> None:
    pwned = foreign.parent / "pwned"
    location = f"{location} {corpus}/train/manifest.json".replace("PWNED", str(pwned))
    change(foreign, key, location.replace("9 /", "9/"))
    commands = [["evaluate", str(foreign)]]
    commands += [[name, str(foreign / "config.yaml")] for name in ("train", "doctor", "submit")]
    if key == "data.manifest":
        shutil.rmtree(foreign / "data")
        commands += [
            ["generate", str(foreign), "--prompt", "x"],
            ["export", str(foreign), f"{foreign.parent}/x"],
        ]
    for command in commands:
        assert main(command) == 2, command
        printed = capsys.readouterr().err
        (line,) = [one for one in printed.splitlines() if key in one] or [printed]
        assert "in the config of" in line
        assert "docs/safety.md" in line
    assert not pwned.exists()


def test_what_was_typed_is_used_and_remembered_for_the_runs_of_the_user(
    foreign: Path, corpus: Path
) -> None:
    file = foreign / "config.yaml"
    location = f"pipe:cat {corpus}/train/manifest.json"
    change(foreign, "data.manifest", location)
    change(foreign, "tracking.uri", "http://127.0.0.1:9")
    change(foreign, "slurm.extra", ["--reservation=a"])
    with pytest.raises(ConfigError, match=r"^data.manifest: found"):
        load_run(file)
    typed = [f"data.manifest={location}", "tracking.uri=http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"^slurm.extra: found '--reservation=a'"):
        load_run(file, typed)
    load_run(file, [*typed, "slurm.extra=[--reservation=a]"])
    assert load_run(file).data.manifest == location
    change(foreign, "data.manifest", f"{location} ")
    with pytest.raises(ConfigError, match=r"^data.manifest: found"):
        load_run(file)


def test_an_evaluation_sends_nothing_to_a_server_that_nobody_named(
    foreign: Path, corpus: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longhaul.pipeline.tracking.tracker import Tracker

    change(foreign, "tracking.uri", "http://127.0.0.1:9")
    monkeypatch.setattr(Tracker, "start", lambda self: pytest.fail("it connects"))
    command = ["evaluate", str(foreign), "--tasks", "bigram", "--data", str(corpus)]
    assert main(command) == 0
    assert "which you have not named before: nothing is sent there" in caplog.text
    assert "bigram" in (foreign / "logs" / "evaluation.jsonl").read_text()


@pytest.mark.parametrize("mark", ["environment.json", "checkpoints", "logs/metrics.jsonl", "DONE"])
def test_a_run_is_known_by_any_of_its_files(foreign: Path, mark: str) -> None:
    change(foreign, "data.manifest", "pipe:touch pwned; cat manifest.json")
    for path in foreign.iterdir():
        if path.name not in ("config.yaml", mark.partition("/")[0]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ConfigError, match=r"^data.manifest: found 'pipe:"):
        load_run(foreign / "config.yaml")


def test_the_config_of_a_submitted_run_is_that_of_its_folder(foreign: Path) -> None:
    (foreign / "slurm").mkdir()
    (foreign / "slurm" / "train.sbatch").touch()
    file = foreign / "slurm" / "config.yaml"
    for key, value in (("root", str(foreign.parent)), ("name", foreign.name)):
        change(foreign, key, value)
    shutil.copy(foreign / "config.yaml", file)
    change(foreign, "tracking.uri", f"sqlite:///{foreign.parent}/mlflow.db")
    shutil.copy(foreign / "config.yaml", file)
    assert RunFolder.of(load_run(file)).path == foreign
    change(foreign, "root", "/tmp")
    shutil.copy(foreign / "config.yaml", file)
    with pytest.raises(ConfigError, match=r"^root: found '/tmp'"):
        load_run(file)


@pytest.mark.parametrize(
    "name", ["logs", "logs/evaluation.jsonl", "logs/run_key.lock", "evaluation", "mlflow_run_id"]
)
def test_no_link_is_followed_where_something_is_written(
    foreign: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    precious = foreign.parent / "precious"
    precious.mkdir()
    (precious / "a").write_text("precious")
    path = foreign / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(precious if name in ("logs", "evaluation") else precious / "a")
    for command in (["evaluate", str(foreign)], ["train", str(foreign / "config.yaml")]):
        assert main(command) == 2
        assert f"{path}: found a link to " in capsys.readouterr().err
    assert os.listdir(precious) == ["a"]
    assert (precious / "a").read_text() == "precious"
