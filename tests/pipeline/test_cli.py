"""The `longhaul` command itself: help, version, and how it refuses what it does not know."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

import longhaul
from longhaul.configs import load_run_config
from longhaul.configs.loader import flatten
from longhaul.modules.attention import registered_variants
from longhaul.pipeline import cli
from longhaul.pipeline.cli import COMMANDS, main

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("arguments", [["help"], ["--help"], ["-h"], ["help", "help"]])
def test_help_lists_all_commands(arguments: list[str], capsys: Output) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_help_of_a_command_is_its_own(capsys: Output) -> None:
    shown = []
    for arguments in (["help", "export"], ["export", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "DST" in shown[0]


def test_the_help_of_evaluate_says_where_texts_stand(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "stands after RUN, or RUN would be read as one of them" in shown


def test_version(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"longhaul {longhaul.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "command: found 'trian', the nearest is train"),
        (["help", "trian"], "command: found 'trian', the nearest is train"),
        (["xyzzy"], f"command: found 'xyzzy', wanted one of {', '.join(COMMANDS)}"),
        ([], "command: found none, wanted one of those above"),
    ],
)
def test_unknown_commands_are_named(arguments: list[str], message: str, capsys: Output) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"longhaul: {message}"


@pytest.mark.parametrize(
    "arguments", [["status", "--exp", "demo"], ["prepare", "text", "--tok", "bytes", "data"]]
)
def test_options_are_not_abbreviated(arguments: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_only_what_is_missing_is_named(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    error = capsys.readouterr().err
    assert error.endswith("the following arguments are required: config\n")


@pytest.mark.parametrize("arguments", [["help"], ["train", "--help"], ["config", "--keys"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "longhaul.pipeline.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_config_prints_what_it_would_load(tmp_path: Path, capsys: Output) -> None:
    overrides = ["name=wide", "model.width=384", "trainer.max_tokens=1e6"]
    assert main(["config", "run/demo.yaml", *overrides]) == 0
    text = capsys.readouterr().out
    (tmp_path / "wide.yaml").write_text(text)
    assert load_run_config(tmp_path / "wide.yaml") == load_run_config("run/demo.yaml", overrides)
    assert yaml.safe_load(text)["checkpoint"]["keep_last"] == 2


def test_config_lists_keys_kinds_and_presets(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "run/demo.yaml"]) == 0
    used = flatten(yaml.safe_load(capsys.readouterr().out))
    assert main(["config", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {key for key in used if "attention" not in key} <= {line.split()[0] for line in lines}
    (row,) = [line for line in lines if line.startswith("trainer.micro_batch ")]
    assert row.split(maxsplit=4)[1:4] == ["whole", "number", "required"]
    assert "Samples that a rank passes" in row
    (row,) = [line for line in lines if line.startswith("model.attention.degree (sympow) ")]
    assert row.split()[4] == "2"

    assert main(["config", "--kinds"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == list(registered_variants())
    assert ["softmax", "quadratic"] in [row[:2] for row in rows]
    assert all(row[2].endswith(".") for row in rows)

    assert main(["config", "--presets"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = dict(rows)
    assert told["run/demo.yaml"].startswith("On a laptop: about three minutes")
    assert "run/paper/softmax-256.yaml" in told


@pytest.mark.parametrize("arguments", [[], ["run/demo.yaml", "--keys"]])
def test_config_wants_a_config_or_a_list(arguments: list[str], capsys: Output) -> None:
    assert main(["config", *arguments]) == 2
    assert "wanted CONFIG, or one of --keys, --kinds, --presets" in capsys.readouterr().err


def test_memory_of_a_gpu_grows_without_gaps_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value, wanted in (
        ("UNRELATED", "1", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "backend:native", "backend:native"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", None),
    ):
        environment = {name: value}
        monkeypatch.setattr(os, "environ", environment)
        assert main(["--version"]) == 0
        assert environment.get("PYTORCH_ALLOC_CONF") == wanted


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_failure_does_not_wait_for_ranks_over_nccl(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(os, "_exit", ended.append)
    assert main(["nonsense"]) == 2
    assert ended == ([2] if backend == "nccl" else [])
    assert capsys.readouterr().err.startswith("longhaul: command: found 'nonsense'")


def test_what_is_interrupted_twice_is_interrupted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main([]) == 130
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "longhaul: interrupted\n"
