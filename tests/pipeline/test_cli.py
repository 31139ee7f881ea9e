"""The `longhaul` command itself: help, version, and how it refuses what it does not know."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import yaml

import longhaul
from longhaul.configs import load_run_config
from longhaul.configs.loader import flatten
from longhaul.modules.attention import registered_variants
from longhaul.pipeline import cli
from longhaul.pipeline.cli import COMMANDS, main
from longhaul.pipeline.terminal.output import exact_stdout, plain_terminal

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


@pytest.mark.parametrize(
    "arguments",
    [["help"], ["train", "--help"], pytest.param(["config", "--keys"], marks=pytest.mark.wide)],
)
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


def test_text_that_the_terminal_cannot_show_ends_no_command() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    script = (
        "import sys; from longhaul.pipeline import cli; "
        "cli._run = lambda words: print('\\u65e5') or 0; sys.exit(cli.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        check=False,
        timeout=60,
        capture_output=True,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\u65e5\n", b"")


def test_no_control_character_of_a_name_or_a_file_reaches_the_terminal(
    tmp_path: Path, capsys: Output
) -> None:
    name = "\x1b[2J\x07\u202e\x9b31m"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.yaml").write_text("{}")
    assert main(["status", str(tmp_path)]) == 0
    assert main(["config", str(tmp_path / f"{name}.yaml")]) == 2
    (tmp_path / "a.yaml").write_text('"\\e[2J": 1\nmodel: {attention: {kind: "\\e[2J"}}\n')
    assert main(["config", str(tmp_path / "a.yaml")]) == 2
    with pytest.raises(SystemExit):
        main(["status", f"--{name}"])
    printed = "".join(capsys.readouterr())
    assert r"\x1b[2J" in printed
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(printed)


def test_a_message_has_a_bounded_length(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "x" * 100_000]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 1300


def test_a_config_that_never_ends_or_grows_when_read_is_refused(
    tmp_path: Path, capsys: Output
) -> None:
    large, bomb = tmp_path / "large.yaml", tmp_path / "bomb.yaml"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    bomb.write_text("\n".join(rows))
    for file, found in ((large, "found more than 1,048,576 bytes"), (bomb, "100000 values")):
        for command in ("config", "plan", "train"):
            assert main([command, str(file)]) == 2
            assert found in capsys.readouterr().err


def test_what_is_printed_is_plain_and_a_generated_text_is_exact_in_a_file(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, wanted in ((True, r"a\x1b[2J"), (False, "a\x1b[2J")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda one=is_terminal: one)
        with plain_terminal():
            print("a\x1b[2J\x9b\r\n", end="")
            sys.stderr.writelines(["b\x07", "\n"])
            print("a\x1b[2J", file=exact_stdout())
        out, error = capsys.readouterr()
        assert out == f"a\\x1b[2J\\x9b\r\n{wanted}\n"
        assert error == "b\\x07\n"


def test_a_full_device_without_a_path_says_where_space_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=len(folder)))

    def full(arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("longhaul.pipeline.cli._run", full)
    assert main(["train"]) == 1
    expected = "longhaul: No space left on device: 8 bytes are free in /dev/shm, "
    told = capsys.readouterr().err
    assert told.startswith(expected)
    assert told.endswith(f"{len(str(tmp_path))} bytes are free in {tmp_path}\n")


@pytest.mark.parametrize("name", ["new.unit", "gone/new.unit"])
@pytest.mark.parametrize("has_message", [False, True])
def test_a_full_device_with_a_path_says_what_is_left_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, tmp_path: Path, name: str, has_message: bool
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=len(folder)))
    path = tmp_path / name

    def full(arguments: object) -> int:
        cause = OSError(errno.ENOSPC, "No space left on device", str(path))
        if has_message:
            raise OSError(f"{path} cannot be written: {cause.strerror}") from cause
        raise cause

    monkeypatch.setattr("longhaul.pipeline.cli._run", full)
    assert main(["train"]) == 1
    removed = ", now that what was written of it is removed"
    what = f"{path} cannot be written" if has_message else path
    free = f"{len(str(tmp_path))} bytes are free in {tmp_path}"
    assert (
        capsys.readouterr().err == f"longhaul: {what}: No space left on device: {free}{removed}\n"
    )
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert main(["train"]) == 1
    free = f"{len(str(path.parent))} bytes are free in {path.parent}"
    assert capsys.readouterr().err == f"longhaul: {what}: No space left on device: {free}\n"


def test_too_few_open_files_are_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (20, 20))
    assert main(["train", "run/demo.yaml"]) == 1
    told = "longhaul: found a limit of 20 open files, wanted 128 or more: ulimit -Hn\n"
    assert capsys.readouterr().err == told


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
