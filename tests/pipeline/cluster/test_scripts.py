"""Scripts for sbatch from a config: what is in them is quoted, and what cannot be is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.configs import ConfigError, load_run_config
from longhaul.pipeline.cli import main
from longhaul.pipeline.cluster.scripts import (
    evaluate_script,
    prepare_script,
    sweep_script,
    train_script,
)

ASKED = [
    "slurm.memory=64G",
    "slurm.modules=[cuda/12.4, gcc/13.2.0+x]",
    "slurm.environment=[HF_HOME=/data/it's here, 'EMPTY=', A=\"$(touch pwned)\" `id` $HOME \\ !x]",
    "slurm.container=docker://nvcr.io#nvidia/pytorch:25.01-py3",
    "slurm.container_mounts=[/data:/data:ro, '/home/me:/home/me']",
    "name=a b $(touch pwned) 'q' \U0001f600",
    "data.manifest=pipe:cat 'a' \"b\" $(touch pwned) `id`; cat manifest.json",
    "tracking.uri=http://me:secret@lab:5000",
]


@pytest.mark.parametrize("which", ["train", "evaluate", "sweep", "prepare"])
def test_a_script_with_all_keys_is_sound(which: str, tmp_path: Path) -> None:
    config = load_run_config("run/demo.yaml", ASKED)
    text = {
        "train": lambda: train_script(config, tmp_path, tmp_path / "config.yaml"),
        "evaluate": lambda: evaluate_script(config, tmp_path),
        "sweep": lambda: sweep_script([config], tmp_path, [tmp_path / "a b.sbatch"], 4),
        "prepare": lambda: prepare_script(config, tmp_path, ["text", "a b", "c"], 3, 2),
    }[which]()
    script = tmp_path / "script.sbatch"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # that of the development packages
    # A value such as $HOME is meant as it stands.
    command = [str(shellcheck), "--shell=bash", "--exclude=SC2016", str(script)]
    subprocess.run(command, check=True)


def test_a_job_has_its_modules_variables_and_container(tmp_path: Path) -> None:
    config = load_run_config("run/demo.yaml", ASKED)
    programs = tmp_path / "bin"
    programs.mkdir()
    # The last commands of the template, after all the settings.
    (programs / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$HF_HOME" "$A" "<$EMPTY>"\n')
    (programs / "srun").chmod(0o755)
    (tmp_path / "checkpoints" / "step-000000001").mkdir(parents=True)
    config_with_then = load_run_config("run/demo.yaml", [*ASKED, "slurm.then=[evaluate]"])
    script = evaluate_script(config_with_then, tmp_path)
    loaded = 'module() { echo "module $*"; }\nexport -f module\n' + script
    result = subprocess.run(
        ["bash", "-c", loaded],
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines() == [
        "module load cuda/12.4",
        "module load gcc/13.2.0+x",
        "--container-image=docker://nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/data:/data:ro,/home/me:/home/me",
        *("python", "-m", "longhaul.pipeline.cli", "evaluate", str(tmp_path)),
        "/data/it's here",
        'A="$(touch pwned)" `id` $HOME \\ !x'.removeprefix("A="),
        "<>",
    ], result.stderr
    assert not (tmp_path / "pwned").exists()
    train = train_script(config, tmp_path, tmp_path / "config.yaml")
    assert "#SBATCH --mem=64G\n" in train
    assert "CONTAINER=docker://nvcr.io#nvidia/pytorch:25.01-py3\n" in train.replace("'", "")
    assert sys.executable not in train


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slurm.memory=64 gigabytes", "slurm.memory: found '64 gigabytes', wanted a size, such as"),
        ("slurm.time=soon", "slurm.time: found 'soon', wanted days too, as in 0-12:00:00"),
        ("slurm.time=43200", "slurm.time: found the number 43200, wanted days too"),
        ("slurm.time=1-", "slurm.time: found '1-', wanted days too"),
        ("slurm.modules=[cuda 12]", "slurm.modules: found 'cuda 12', wanted the name of a module"),
        ("slurm.modules=[-f]", "slurm.modules: found '-f', wanted the name of a module"),
        ("slurm.environment=[1A=b]", "slurm.environment: found '1A=b', wanted NAME=VALUE"),
        ("slurm.environment=[A]", "slurm.environment: found 'A', wanted NAME=VALUE"),
        ('slurm.environment=["A=a\\nb"]', "slurm.environment: found 'A=a.*b', wanted NAME=VALUE"),
        ("slurm.environment={A: 1}", "slurm.environment: found {'A': 1}, wanted a valid list"),
        ("slurm.container=--x", "slurm.container: found '--x', wanted the name or path of"),
        ("slurm.container_mounts=[/a:/b]", "slurm.container: found null with container_mounts"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_run_config("run/demo.yaml", [override])


@pytest.mark.parametrize("time", ["12:00:00", "30:00", "1-0", "1-12:30", "7-00:00:00", "UNLIMITED"])
def test_times_of_sbatch_are_taken_as_they_are(time: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"inherits: [run/demo.yaml]\nslurm: {{time: {time}}}\n")
    for config in (load_run_config(file), load_run_config("run/demo.yaml", [f"slurm.time={time}"])):
        assert config.slurm.time == time
        assert f"#SBATCH --time={time}\n" in train_script(config, tmp_path, file)


def test_a_dry_run_prints_the_script_where_the_data_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["submit", "run/demo.yaml", "data.manifest=nowhere", "trainer.accelerator=cpu"]
    assert main([*command, "--dry-run"]) == 0
    assert "#SBATCH --job-name=demo\n" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--seeds", "2"]) == 0
    assert "#SBATCH --array=0-1%4\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["data.manifest=nowhere", "--seeds=2"])
def test_what_is_queued_needs_its_data(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda program: program)
    assert main(["submit", "run/demo.yaml", "trainer.accelerator=cpu", option]) == 2
    assert capsys.readouterr().err.startswith("longhaul: data.manifest: ")
    assert list(tmp_path.iterdir()) == []
