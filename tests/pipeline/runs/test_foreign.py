"""What the config of someone else's run may not bring about."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from longhaul.configs import ConfigError, to_yaml
from longhaul.pipeline.cli import main
from longhaul.pipeline.cluster.scripts import train_script
from longhaul.pipeline.runs.folder import RunFolder, load_run, remember_named
from longhaul.pipeline.runs.named_keys import SUBMITTED

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture
def foreign(uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of someone else's, on the machine of a user who has named nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(uninterrupted.path / "small", tmp_path / "runs" / "foreign")
    shutil.rmtree(tmp_path / "runs" / "foreign" / "evaluation", ignore_errors=True)
    shutil.copy(uninterrupted.path / "mlflow.db", tmp_path / "runs" / "mlflow.db")
    return tmp_path / "runs" / "foreign"


def change(run: Path, key: str, value: Any) -> None:
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    file.write_text(yaml.safe_dump(config))


def wide(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


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
        load_run(file, typed, SUBMITTED)
    typed += ["slurm={extra: [--reservation=a]}"]
    config = load_run(file, typed, SUBMITTED)
    with pytest.raises(ConfigError, match=r"^data.manifest: found"):  # looking is not trusting
        load_run(file)
    remember_named(config, file, typed, SUBMITTED)
    assert load_run(file, [], SUBMITTED).data.manifest == location
    change(foreign, "data.manifest", f"{location} ")
    with pytest.raises(ConfigError, match=r"^data.manifest: found"):
        load_run(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("container", "docker://theirs"),
        ("environment", ["LD_PRELOAD=/tmp/theirs.so"]),
        wide("modules", ["theirs"]),
        wide("modules", ["../theirs"]),
        ("account", "mine"),
        wide("partition", "dear"),
    ],
)
def test_a_job_gets_nothing_of_slurm_that_only_the_config_names(
    foreign: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    change(foreign, f"slurm.{key}", value)
    file = str(foreign / "config.yaml")
    assert load_run(file).slurm  # `train` uses none of it
    assert main(["submit", file, "--dry-run"]) == 2
    assert f"slurm.{key}: found " in capsys.readouterr().err
    assert main(["submit", file, "--dry-run", f"slurm.{key}={json.dumps(value)}"]) == 0
    assert main(["submit", file, "--dry-run"]) == 2


def test_a_job_needs_no_list_on_its_node(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    location = "pipe:cat 'a b'/manifest.json; echo $HOME"
    change(foreign, "data.manifest", location)
    change(foreign, "data.cache_dir", str(tmp_path / "a cache"))
    change(foreign, "tracking.uri", "http://me:secret@127.0.0.1:9/x")
    (foreign / "config.yaml").rename(own)
    config = load_run(own, [f"root={foreign.parent}", f"name={foreign.name}"], SUBMITTED)
    script = train_script(config, foreign, foreign / "slurm" / "config.yaml")
    assert "secret" not in script
    file = foreign / "slurm" / "config.yaml"
    file.parent.mkdir()
    file.with_name("train.sbatch").write_text(script)
    file.write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"^data.manifest: found"):
        load_run(file)
    (line,) = re.findall(r"^export LONGHAUL_NAMED='[^$]*\$HOME.*?'$", script, re.M | re.S)
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$LONGHAUL_NAMED"'], capture_output=True, text=True
    )
    monkeypatch.setenv("LONGHAUL_NAMED", shown.stdout)
    assert load_run(file).data.manifest == location


def test_a_flow_mapping_on_the_command_line_is_typed_too(foreign: Path) -> None:
    uri = "http://127.0.0.1:9"
    config = load_run(foreign / "config.yaml", [f"tracking={{uri: '{uri}'}}"])
    assert config.tracking.uri == uri


def test_an_evaluation_does_not_write_into_a_cache_that_only_the_config_names(
    foreign: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(foreign, "data.cache_dir", str(foreign.parent / "elsewhere"))
    fsspec.filesystem("memory").put(f"{corpus}/train", "/shards", recursive=True)
    command = ["evaluate", str(foreign), "--tasks", "bigram", "--data", "memory://shards"]
    assert main(command) == 2
    assert "data.cache_dir: found " in (printed := capsys.readouterr().err)
    assert "give --data a folder on this machine" in printed
    assert not (foreign.parent / "elsewhere").exists()


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


@pytest.mark.parametrize(
    "mark", ["environment.json", "checkpoints", "logs/metrics.jsonl", "DONE", "data"]
)
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


def test_a_link_beside_what_is_written_stops_no_training(foreign: Path) -> None:
    (foreign / "latest").symlink_to(foreign / "checkpoints")
    assert main(["train", str(foreign / "config.yaml")]) == 0  # it is finished


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
        printed = capsys.readouterr().err
        assert f"{path}: found a link to " in printed
        assert "move it there whole" in printed
    assert os.listdir(precious) == ["a"]
    assert (precious / "a").read_text() == "precious"


@pytest.mark.parametrize("command", ["export", "average"])
@pytest.mark.parametrize("planted", ["export", "export/deep", "export/new"])
def test_no_export_or_mean_goes_through_a_link_in_the_run_folder(
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    planted: str,
    command: str,
) -> None:
    elsewhere = foreign.parent / "elsewhere"
    elsewhere.mkdir()
    (foreign / planted).parent.mkdir(exist_ok=True)
    (foreign / planted).symlink_to(elsewhere)
    # The run is known by whatever name it has.
    (foreign.parent / "linked").symlink_to(foreign)
    monkeypatch.chdir(foreign.parent)
    for run, destination in ((str(foreign), "linked"), ("linked", "foreign")):
        assert main([command, run, f"{destination}/export/new"]) == 2
        assert f"{planted}: found a link to " in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("name", "form", "found"),
    [
        ("foreign/export", "link", "found a link to "),
        ("foreign/slurm/jobs.jsonl", "link", "found a link to "),
        ("foreign/slurm/jobs.jsonl", "FIFO", "found a FIFO"),
        ("foreign-sweep", "link", "found a link to "),
        wide("foreign-sweep/configs", "link", "found a link to "),
        wide("foreign-sweep/logs", "link", "found a link to "),
        wide("foreign-sweep/slurm", "link", "found a link to "),
        ("foreign-sweep/slurm/jobs.jsonl", "FIFO", "found a FIFO"),
    ],
)
def test_nothing_is_queued_where_a_link_would_be_followed(
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    form: str,
    found: str,
) -> None:
    root = foreign.parent
    elsewhere, sbatch = root / "elsewhere", root / "sbatch"
    elsewhere.mkdir()
    sbatch.write_text(f"#!/bin/sh\ntouch {root}/queued; echo 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(root), prepend=":")
    planted = root / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(elsewhere) if form == "link" else os.mkfifo(planted)
    config = str(foreign / "config.yaml")
    commands = [["submit", config, "trainer.max_tokens=100000"]]
    if "-sweep" in name:
        commands = [["submit", config, "--sweep", "trainer.seed=1,2"]]
        if form == "link":
            commands += [["train", config, "--sweep", "trainer.seed=1,2", "--parallel", "2"]]
    for command in commands:
        assert main(command) == 2
        assert f"{name}: {found}" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
    assert not (root / "queued").exists()


@pytest.mark.parametrize("name", ["best.yaml", "slurm/config.yaml"])
def test_any_config_in_the_folder_of_a_run_is_a_runs(foreign: Path, name: str) -> None:
    change(foreign, "data.manifest", "pipe:touch pwned")
    (foreign / "slurm").mkdir(exist_ok=True)
    shutil.copy(foreign / "config.yaml", foreign / name)
    with pytest.raises(ConfigError, match=r"^data.manifest: found 'pipe:touch pwned'"):
        load_run(foreign / name)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("name", "${oc.env:SECRET}", r"name: found '${oc.env:SECRET}', wanted a plain value"),
        ("inherits", ["../own.yaml"], "inherits: "),
        ("inherits", ["run/demo.yaml"], "inherits: "),  # one of the folder's own
    ],
)
def test_nothing_of_this_machine_gets_into_the_config_of_a_run(
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_marks: bool,
    key: str,
    value: Any,
    found: str,
) -> None:
    monkeypatch.setenv("SECRET", "topsecret")
    (foreign.parent / "own.yaml").write_text("name: topsecret")
    (foreign / "run").mkdir()
    (foreign / "run" / "demo.yaml").write_text("name: topsecret")
    change(foreign, key, value)
    for path in foreign.iterdir() if not has_marks else ():
        if path.name not in ("config.yaml", "data", "run"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = str(foreign / "config.yaml")
    for command in ("config", "plan", "train", "submit", "doctor"):
        arguments = [command, config, *(["--dry-run"] if command == "submit" else [])]
        assert main(arguments) == 2, command
        printed = "".join(capsys.readouterr())
        assert f"{config}: {found}" in printed
        assert "topsecret" not in printed


def test_a_config_beside_data_inherits_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Path("config.yaml").write_text("inherits: [run/demo.yaml]\nname: mine\n")
    assert load_run("config.yaml").name == "mine"


def test_the_name_of_a_folder_is_not_resolved(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "topsecret")
    moved = foreign.rename(foreign.with_name("${oc.env:SECRET}"))
    with pytest.raises(ConfigError, match=r"found '\$\{' in the path of a run"):
        load_run(moved / "config.yaml")
