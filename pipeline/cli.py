"""The `longhaul` command. Each subcommand is a module of `commands/`, imported when called."""

import argparse
import difflib
import functools
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import longhaul
from longhaul.datamodules.files.atomic import FULL
from longhaul.pipeline.system.open_files import check_open_files
from longhaul.pipeline.terminal.output import message, plain_terminal

# A command's module is imported only when it runs: torch and mlflow take seconds to import, and
# `longhaul --help` or a preparation on a login node should not wait for them.
COMMANDS = {
    "prepare": "write a corpus as shards",
    "data": "show what shards hold, or where the sample of a run comes from",
    "config": "print a config with all its values, or list keys, kinds and presets",
    "train": "start a run, or resume it; or train a sweep of runs",
    "status": "show the progress of runs",
    "evaluate": "measure a run's checkpoint",
    "average": "write the mean of a run's last checkpoints as a run folder",
    "generate": "continue a prompt",
    "export": "write a checkpoint as a folder that transformers loads",
    "import": "make a run of a folder that transformers has saved",
    "report": "draw figures and tables of an MLflow experiment, and a page that shows them all",
    "submit": "queue a run, its follow-up jobs or a sweep with Slurm",
    "plan": "count parameters, FLOPs and state bytes of a config, before anything runs",
    "doctor": "report what this machine or allocation can run, and why not",
    "verify": "check and time everything on this machine, in pieces of a few minutes",
    "bench": "compare speeds with other implementations, measured in the same run",
    "help": "explain a command: longhaul help COMMAND",
}

# By these names torch takes settings of a GPU's memory, which count from the first tensor there on.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviations of options, as do the parsers of its sub-commands.

    An abbreviation would change its meaning, or end a script, when an option is added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if settings.get("nargs") == "*" and not names[0].startswith("-"):
            # Without a default, argparse would list it among the missing arguments.
            settings.setdefault("default", [])
        if settings.get("type") is int:
            settings["type"] = functools.partial(_count, names[0])
        if settings.get("type") is Path:
            settings["type"] = _path
        return super().add_argument(*names, **settings)


def _count(option: str, text: str) -> int:
    """The number in the text of an option, such as 4k."""
    try:
        return int(text)
    except ValueError:
        from longhaul.configs.counts import parse_count  # more than help should wait for

    try:
        return parse_count(text, option)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option}: ")) from None


def _path(text: str) -> Path:
    """A shell leaves ~ in the middle of a word, as in --json=~/verify.json."""
    return Path(text).expanduser()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status 0, 1 for a failure while running, 2 for bad input."""
    if not any(name in os.environ for name in _ALLOCATOR):
        # Pieces of memory that can grow leave no gaps that are too small for the next tensor.
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    try:
        try:
            with plain_terminal():
                status = _status(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # At the exit of Python, a failure could not be caught any more.
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it. Python must not write to it at
        # exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    if _is_connected_over_nccl():
        # Python's own exit would wait for the other ranks, of which one may have failed.
        os._exit(status)
    return status


def _is_connected_over_nccl() -> bool:
    """Whether a run has failed in ranks that are still connected; one that ends disconnects."""
    distributed = sys.modules.get("torch.distributed")  # without importing it
    if distributed is None or not distributed.is_initialized():
        return False
    return bool(distributed.get_backend() == "nccl")


def _status(arguments: list[str]) -> int:
    """The exit status of a command, after a line that explains a failure."""
    try:
        return _run(arguments)
    except BrokenPipeError:
        raise
    except ValueError as error:
        return _fail(error, status=2)
    except OSError as error:
        return _fail(_explained(error), status=1)
    except RuntimeError as error:
        return _fail(error, status=1)
    except KeyboardInterrupt:
        # Pressed again, it would interrupt what Python does at its exit, with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("longhaul: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_summary(), file=sys.stderr)
        raise ValueError("command: found none, wanted one of those above")
    name, *rest = arguments
    if name == "help":
        name, rest = (rest[0], ["--help"]) if rest else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_summary())
        return 0
    if name == "--version":
        print(f"longhaul {longhaul.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        wanted = f"the nearest is {near[0]}" if near else f"wanted one of {', '.join(COMMANDS)}"
        raise ValueError(f"command: found {name!r}, {wanted}")
    module = importlib.import_module(f"longhaul.pipeline.commands.{name}")
    parser = _Parser(prog=f"longhaul {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    # Intermixed, because values such as model.width=64 may come before or after options.
    parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
    parsed = parse(rest)
    check_open_files()
    return int(module.main(parsed))


def _summary() -> str:
    lines = ["usage: longhaul COMMAND ... (longhaul help COMMAND explains each)", ""]
    return "\n".join(lines + [f"  {name:<10} {text}" for name, text in COMMANDS.items()])


def _explained(error: OSError) -> str:
    """The message of an error; one of the system's own is a number and a name in brackets."""
    told = error.strerror
    if told is None:
        told = str(error)
    elif error.filename is not None:
        told = f"{error.filename}: {told}"
    # The cause of an error with a message of its own.
    full = error.__cause__ if error.strerror is None else error
    if isinstance(full, OSError) and full.errno in FULL and (free := _space_left(full.filename)):
        return f"{told}: {free}"
    return told


def _space_left(path: object) -> str:
    """What is free where a file could not be written, and in what folder, a mounted one or below.

    Where nothing names the file (None), in all folders in which it may have been.
    """
    folders, after = ["/dev/shm", tempfile.gettempdir(), os.getcwd()], ""
    if isinstance(path, str | bytes):
        whole = Path(os.path.abspath(os.fsdecode(path)))
        # Files are written whole or not at all: what did not fit counts no longer.
        after = "" if whole.exists() else ", now that what was written of it is removed"
        folders = [next(str(folder) for folder in whole.parents if folder.is_dir())]
    free = []
    for folder in folders:
        with suppress(OSError):
            free.append(f"{shutil.disk_usage(folder).free:,} bytes are free in {folder}")
    return ", ".join(free) + after if free else ""


def _fail(error: BaseException | str, status: int) -> int:
    print(f"longhaul: {message(error) or type(error).__name__}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
