"""The `longhaul` command. Each subcommand is a module of `commands/`, imported when called."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

# A command's module is imported only when it runs: torch and mlflow take seconds to import, and
# `longhaul --help` or a preparation on a login node should not wait for them.
COMMANDS = {
    "prepare": "write a corpus as shards",
    "train": "start a run, or resume it",
    "status": "show the progress of runs",
    "evaluate": "measure a run's checkpoint",
    "generate": "continue a prompt",
    "export": "write a checkpoint as a folder that transformers loads",
    "report": "draw figures and tables of an MLflow experiment, and a page that shows them all",
    "submit": "queue a run, its follow-up jobs or a sweep with Slurm",
    "plan": "count parameters, FLOPs and state bytes of a config, before anything runs",
    "doctor": "report what this machine or allocation can run, and why not",
    "bench": "compare speeds with other implementations, measured in the same run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status 0, 1 for a failure while running, 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _help(arguments)
    logging.basicConfig(format="longhaul: %(message)s", level=logging.INFO)
    try:
        return _run(arguments[0], arguments[1:])
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it. Python must not write to it at
        # exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        return _fail(error, status=2)
    except (OSError, RuntimeError) as error:
        return _fail(error, status=1)
    except KeyboardInterrupt:
        print("longhaul: interrupted", file=sys.stderr)
        return 130


def _run(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"longhaul.pipeline.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"longhaul {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    # Intermixed, because values such as model.width=64 may come before or after options.
    parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
    return int(module.main(parse(arguments)))


def _help(arguments: list[str]) -> int:
    lines = ["usage: longhaul COMMAND ... (longhaul COMMAND --help explains each)", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    if arguments and arguments[0] in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    found = f"found {arguments[0]!r}" if arguments else "found none"
    print("\n".join(lines), file=sys.stderr)
    print(f"longhaul: command: {found}, wanted one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _fail(error: BaseException, status: int) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    logging.getLogger("longhaul").debug("traceback", exc_info=error)
    print(f"longhaul: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
