"""Scripts for sbatch: options and settings from a config, above the body of a template."""

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.named import VARIABLE, names
from longhaul.pipeline.runs.named_keys import places_of_job
from longhaul.pipeline.system.waiting import SLURM_DELAY_S

_SETTINGS_END = "# -- settings end here --\n"
# The signal to stop comes before the time limit by the seconds that a stop may take, plus these by
# which Slurm's clock may be late.
# The main thread, autograd's, a data worker, the writers of checkpoints and of metrics, and others.
_CPUS_PER_GPU = 8
# In an #SBATCH line all other characters need a backslash, and a space needs quotes.
_SPECIAL = re.compile(r"[^A-Za-z0-9_./:=@%+,-]")


def train_script(config: RunConfig, run: Path, config_file: Path) -> str:
    """The script of a job that trains a run from its config file."""
    slurm = config.slurm
    settings = {
        "RUN": str(run),
        **_place_settings(config),
        "MAX_RESTARTS": str(slurm.max_restarts),
        "REQUEUE": "yes" if slurm.requeue else "no",
    }
    return _script(
        "train",
        [
            *_common_options(config, config.name, run, "%j"),
            *_rank_options(config),
        ],
        [*_assigned(settings), *_preparations(config, run)],
        [str(config_file)],
    )


def sweep_script(
    configs: Sequence[RunConfig], folder: Path, scripts: Sequence[Path], throttle: int
) -> str:
    """The script of a job array, each job of which runs one of `scripts`.

    Raises:
        ConfigError: the runs ask for different resources, which is impossible in one array.
    """
    first, *others = (
        [*_common_options(config, folder.name, folder, "%A_%a"), *_rank_options(config)]
        for config in configs
    )
    for other in others:
        for one, two in zip(first, other, strict=False):
            if one != two:
                raise ConfigError(
                    f"--sweep: found {one} and {two}, wanted runs that ask for the same resources"
                )
    return _script(
        "sweep",
        [*first, f"--array=0-{len(configs) - 1}%{throttle}"],
        [],
        [str(script) for script in scripts],
    )


def evaluate_script(config: RunConfig, run: Path) -> str:
    """The script of a job that runs the commands of slurm.then, on one device."""
    # It needs one device, so not whole nodes with all their memory as training may.
    slurm = dataclasses.replace(config.slurm, exclusive=False, memory=None)
    config = dataclasses.replace(config, slurm=slurm)
    options = [
        *_common_options(config, f"evaluate {config.name}", run, "%j"),
        "--nodes=1",
        "--ntasks=1",
    ]
    if config.slurm.gpu is not None:
        options.append(f"--gpus={_gpu_option(config.slurm.gpu, 1)}")
    settings = {
        "RUN": str(run),
        **_place_settings(config),
        "THEN": " ".join(config.slurm.then),
    }
    return _script("evaluate", options, [*_assigned(settings), *_preparations(config, run)], [])


def prepare_script(
    config: RunConfig, run: Path, arguments: Sequence[str], tasks: int | None, throttle: int
) -> str:
    """The script of a job that prepares data, or of an array of `tasks` that tokenize a part each.

    Args:
        arguments: of `longhaul prepare`.
        tasks: None for the job that packs what the array has tokenized.
        throttle: most tasks at the same time.
    """
    # It needs some processors of one node, so not whole nodes with all their memory.
    config = dataclasses.replace(
        config, slurm=dataclasses.replace(config.slurm, exclusive=False, memory=None)
    )
    settings = {
        **_place_settings(config),
        "MAX_RESTARTS": str(config.slurm.max_restarts),
        "TASKS": str(tasks or ""),
    }
    job = "%j" if tasks is None else "%A_%a"
    options = [
        *_common_options(config, f"prepare {config.name}", run, job),
        "--nodes=1",
        "--ntasks=1",
        "--requeue" if config.slurm.requeue else "--no-requeue",
        *([] if tasks is None else [f"--array=0-{tasks - 1}%{throttle}"]),
    ]
    return _script(
        "prepare", options, [*_assigned(settings), *_preparations(config, run)], arguments
    )


def _place_settings(config: RunConfig) -> dict[str, str]:
    """Which Python runs longhaul, and in which container."""
    slurm = config.slurm
    return {
        # That of this machine is not in the image.
        "PYTHON": sys.executable if slurm.container is None else "python",
        "CONTAINER": slurm.container or "",
        "CONTAINER_MOUNTS": ",".join(slurm.container_mounts),
    }


def _assigned(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in settings.items()]


def _preparations(config: RunConfig, run: Path) -> list[str]:
    """What a job does first: it loads modules and exports variables, in that order."""
    lines = [f"module load {shlex.quote(name)} || exit 69" for name in config.slurm.modules]
    for entry in config.slurm.environment:
        name, _, value = entry.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    # The list of what the user has named may not be on the node.
    if named := names(places_of_job(config, run)):
        lines.append(f"export {VARIABLE}={shlex.quote(chr(10).join(named))}")
    return lines


def _common_options(config: RunConfig, name: str, folder: Path, job: str) -> list[str]:
    slurm = config.slurm
    settings = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "cpus-per-task": _cpus_per_task(config),
        "mem": slurm.memory,
    }
    return [
        f"--job-name={name}",
        f"--output={folder}/logs/job-{job}.log",
        "--open-mode=append",
        *(f"--{option}={value}" for option, value in settings.items() if value is not None),
        *(["--exclusive"] if slurm.exclusive else []),
        *slurm.extra,
    ]


def _cpus_per_task(config: RunConfig) -> int | None:
    """Without it, most clusters give a task one CPU, which all threads of a rank then share."""
    slurm = config.slurm
    is_asked = any(option.startswith(("-c", "--cpus-per-")) for option in slurm.extra)
    if slurm.cpus_per_task is not None or slurm.gpu is None or is_asked:
        return slurm.cpus_per_task
    return _CPUS_PER_GPU


def _rank_options(config: RunConfig) -> list[str]:
    trainer, gpu = config.trainer, config.slurm.gpu
    lead = math.ceil(trainer.stop_seconds) + SLURM_DELAY_S
    limit = _seconds(config.slurm.time or "")
    # Twice: a job that gets the signal while it starts has no new checkpoint, so that it would not
    # be requeued.
    if limit is not None and limit <= 2 * lead:
        raise ConfigError(
            f"slurm.time: found {config.slurm.time}, wanted more than {2 * lead} s: the signal to "
            f"stop comes {lead} s before the end (trainer.stop_seconds)"
        )
    return [
        f"--nodes={trainer.nodes}",
        f"--ntasks-per-node={trainer.devices}",
        *([] if gpu is None else [f"--gpus-per-node={_gpu_option(gpu, trainer.devices)}"]),
        f"--signal=USR1@{lead}",
        "--requeue" if config.slurm.requeue else "--no-requeue",
    ]


def _seconds(limit: str) -> int | None:
    """Seconds of sbatch's time limit: [days-]hours[:minutes[:seconds]], minutes or minutes:seconds.

    None for anything else.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *parts = match.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days is None and parts[2] is None:
        return first * 60 + second
    return ((int(days or 0) * 24 + first) * 60 + second) * 60 + third


def _gpu_option(kind: str, count: int) -> str:
    return f"{count}" if kind == "any" else f"{kind}:{count}"


def _script(
    template: str, options: Sequence[str], settings: Sequence[str], arguments: Sequence[str]
) -> str:
    text = (resources.files("longhaul.slurm") / f"{template}.sbatch").read_text()
    _, end, body = text.partition(_SETTINGS_END)
    assert end, f"{template}.sbatch has no line {_SETTINGS_END!r}"
    lines = ["#!/bin/bash", *(f"#SBATCH {_sbatch_escaped(option)}" for option in options)]
    lines += settings
    if arguments:
        lines.append(f"set -- {shlex.join(arguments)}")
    return "\n".join(lines) + f"\n{end}{body}"


def _sbatch_escaped(option: str) -> str:
    if not option.isprintable():  # after a newline, the rest would be a shell command
        raise ConfigError(f"slurm: found {option!r}, wanted printable characters only")
    return _SPECIAL.sub(lambda match: '" "' if match[0] == " " else f"\\{match[0]}", option)
