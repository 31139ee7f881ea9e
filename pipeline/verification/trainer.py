"""The checks of the trainer: `longhaul` commands on a small model, each a process of its own."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.machine import Machine, source_files

# What `longhaul train` imports beyond PyTorch, einops and jaxtyping. Without mlflow it trains too:
# its journal keeps what mlflow would be told.
_PACKAGES = (
    *("lightning", "numpy", "omegaconf", "psutil", "pydantic", "safetensors", "torchmetrics"),
    *("tqdm", "webdataset"),
)

_SECONDS = 300.0
_COMPILED = "trainer.compile=true"
_DETERMINISTIC = "trainer.deterministic=true"
_UPDATES = 8
_MOST_DEVICES = 8
# Losses of other strategies and numbers of ranks differ by rounding: on two CPUs by 6e-5 at most in
# bf16-mixed. Ranks that see half of the samples differ by 5e-3 in the first update.
_TOLERANCE = {"32-true": 1e-3, "bf16-mixed": 2e-3}
_SECONDS_TO_BEGIN = 100.0
# A job's scheduler or launcher would make the ranks of a small run its own.
_LAUNCHERS = ("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_", "TORCHELASTIC_")
_TAIL = 1500  # characters

# A GPU gets heads and a context at which the kernels of the headline run.
_SIZES = {
    "cuda": {"layers": 4, "width": 256, "heads": 4, "context": 16_384},
    "cpu": {"layers": 2, "width": 32, "heads": 2, "context": 128},
}
_CONFIG = """
name: small
root: {folder}
model:
  layers: {layers}
  width: {width}
  heads: {heads}
  vocabulary: 320
  attention: {{kind: conformal_sympow}}
data:
  manifest: {folder}/corpus/train
  validation_manifest: {folder}/corpus/validation
  validation_tokens: {context}
  context: {context}
optim:
  tokens_per_update: {update}
  learning_rate: 1.0e-3
trainer:
  max_tokens: {budget}
  micro_batch: 1
  compile: false
  validate_every_tokens: {budget}
checkpoint:
  every_tokens: {half}
tracking:
  uri: sqlite:///{folder}/mlflow.db
  experiment: verify
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A short training: its settings, and those of the run whose losses it must have."""

    label: str
    settings: tuple[str, ...] = ()
    precision: str = "32-true"

    @property
    def name(self) -> str:
        return f"train: {self.label}, {self.precision}"


_ONE = Training(label="single", settings=("trainer.strategy=single",), precision="bf16-mixed")


def first_checks() -> list[Check]:
    """One training, on one device."""
    return [_training(_ONE)]


def remaining_checks(machine: Machine) -> list[Check]:
    """Every strategy that the devices allow, with every precision and with compiled blocks; then
    what follows a training.
    """
    trainings = [one for one in _trainings(machine) if one != _ONE]
    ranks = _ranks(machine)
    return [
        _check("resume: after half the budget", resume, None),
        _check("resume: to the bit under trainer.deterministic", resume_to_the_bit, None),
        _check("stop: a signal, and the same command again", stop, None),
        _evaluation("evaluate: one process", 1),
        _check("generate: greedy, twice", generate, None),
        _check("export", export, None),
        _check("doctor", doctor, None),
        *map(_training, trainings),
        *([_evaluation(f"evaluate: {ranks} processes", ranks)] if ranks > 1 else []),
    ]


def _check(name: str, function: Any, argument: Any) -> Check:
    return Check(
        part="trainer",
        name=name,
        function=function,
        argument=argument,
        seconds=_SECONDS,
        needs=Needs(packages=_PACKAGES),
    )


def _evaluation(name: str, ranks: int) -> Check:
    needs = Needs(packages=(*_PACKAGES, "matplotlib"))
    return replace(_check(name, evaluate, ranks), needs=needs)


def _training(training: Training) -> Check:
    check = _check(training.name, train, training)
    if "trainer.strategy=deepspeed" in training.settings:
        check = replace(check, needs=Needs(packages=(*_PACKAGES, "deepspeed")))
    return check


def _ranks(machine: Machine) -> int:
    """How many ranks train together: a power of two, since they share eight samples an update."""
    if machine.device == "cpu":
        return 2
    return 1 << (min(machine.devices, _MOST_DEVICES).bit_length() - 1)


def _trainings(machine: Machine) -> Iterator[Training]:
    ranks = _ranks(machine)
    together = (f"trainer.devices={ranks}",)
    of = f"{ranks} rank{'s' if ranks > 1 else ''}"
    for precision in ("bf16-mixed", "32-true"):
        several: list[tuple[str, tuple[str, ...]]] = [
            ("single", ("trainer.strategy=single",)),
            (f"ddp on {of}", ("trainer.strategy=ddp", *together)),
            (f"fsdp on {of}", ("trainer.strategy=fsdp", *together)),
        ]
        for label, settings in several:
            yield Training(label=label, settings=settings, precision=precision)
            yield Training(
                label=f"{label}, compiled", settings=(*settings, _COMPILED), precision=precision
            )
        if ranks >= 4:
            settings = ("trainer.strategy=fsdp", "trainer.replicas=2", *together)
            yield Training(label=f"fsdp, 2 replicas, {of}", settings=settings, precision=precision)
        for stage in (1, 2, 3):
            settings = ("trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}", *together)
            yield Training(
                label=f"deepspeed {stage} on {of}", settings=settings, precision=precision
            )
        if ranks > 1:
            settings = ("trainer.strategy=ddp", f"trainer.context_parallel={ranks}", *together)
            yield Training(
                label=f"context parallel on {of}", settings=settings, precision=precision
            )
        recomputed = ("trainer.strategy=single", "trainer.activation_checkpointing=1")
        yield Training(label="single, recomputed", settings=recomputed, precision=precision)


class CommandError(Exception):
    """A command that did not end as it should."""


def train(training: Training, place: Place) -> dict[str, Any]:
    """Train, and compare all losses with those of one device without compilation."""
    name = f"run-{time.monotonic_ns()}"
    started = time.monotonic()
    _longhaul(place, *_train(training.precision, *training.settings, f"name={name}"))
    seconds = time.monotonic() - started
    lines = _journal(place, name)
    losses = [one["curves/train_loss"] for one in lines]
    faults = _sound(losses)
    if training.label == "single":
        _keep_reference(place, training.precision, name)
    else:
        faults += _unlike(losses, _reference(place, training.precision), training.precision)
    last = lines[-1] if lines else {}
    return {
        "settings": list(training.settings),
        "losses": losses,
        "seconds": round(seconds, 1),
        "tokens_per_second": last.get("train/tokens_per_second"),
        "peak_bytes": last.get("train/peak_memory_bytes"),
        "faults": faults,
    }


def resume(_: None, place: Place) -> dict[str, Any]:
    """Train half the budget, then all of it: the losses are those of a training without a break."""
    budget = _UPDATES * _tokens_per_update(place)
    command = _train("bf16-mixed", *_ONE.settings, "name=resumed")
    _longhaul(place, *command, f"trainer.max_tokens={budget // 2}")
    half = len(_journal(place, "resumed"))
    _longhaul(place, *command)
    losses = [one["curves/train_loss"] for one in _journal(place, "resumed")]
    reference = _reference(place, "bf16-mixed")
    return {
        "updates_before": half,
        "losses": losses,
        "is_equal_to_the_bit": losses == reference,
        "faults": _unlike(losses, reference, "bf16-mixed"),
    }


def resume_to_the_bit(_: None, place: Place) -> dict[str, Any]:
    """Under trainer.deterministic a break changes no bit of a loss, on GPUs too."""
    budget = _UPDATES * _tokens_per_update(place)
    command = _train("bf16-mixed", *_ONE.settings, _DETERMINISTIC)
    _longhaul(place, *command, "name=whole")
    _longhaul(place, *command, "name=broken", f"trainer.max_tokens={budget // 2}")
    _longhaul(place, *command, "name=broken")
    whole, broken = (
        [one["curves/train_loss"] for one in _journal(place, name)] for name in ("whole", "broken")
    )
    faults = [] if whole == broken else [f"losses: found {broken}, wanted {whole}"]
    return {"losses": broken, "faults": faults}


def stop(_: None, place: Place) -> dict[str, Any]:
    """A signal ends a training with status 75 and a checkpoint, from which it then goes on."""
    _prepared(place)
    updates = 100_000
    budget = f"trainer.max_tokens={updates * _tokens_per_update(place)}"
    command = _train("bf16-mixed", *_ONE.settings, "name=stopped")
    process = subprocess.Popen(
        _arguments(*command, budget),
        **_surroundings(place),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + _SECONDS_TO_BEGIN
    while len(_journal(place, "stopped")) < 2:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise CommandError(f"two updates were not made: {process.communicate()[1][-_TAIL:]}")
        time.sleep(0.2)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    error = process.communicate()[1]
    seconds = time.monotonic() - asked
    done = len(_journal(place, "stopped"))
    if process.returncode != 75:
        raise CommandError(f"status {process.returncode}, wanted 75: {error[-_TAIL:]}")
    more = f"trainer.max_tokens={(done + 2) * _tokens_per_update(place)}"
    _longhaul(place, *command, more)
    losses = [one["curves/train_loss"] for one in _journal(place, "stopped")]
    faults = [] if len(losses) == done + 2 else [f"updates: found {len(losses)}, wanted {done + 2}"]
    return {"seconds_to_stop": round(seconds, 1), "faults": faults + _sound(losses)}


def evaluate(devices: int, place: Place) -> dict[str, Any]:
    """The tasks that need nothing but a run, on so many processes."""
    tasks = "bigram,positions,context,perplexity,passkey,recall,attention"
    context = str(_SIZES[place.device]["context"])
    out = _longhaul(
        *(place, "evaluate", str(_trained(place)), "--tasks", tasks, "--again"),
        *("--devices", str(devices), "--prompts", "5", "--contexts", context, "--lengths", "512"),
    )
    return {"printed": out[-_TAIL:], "faults": [] if out else ["printed nothing"]}


def generate(_: None, place: Place) -> dict[str, Any]:
    """Greedy decoding gives the same text twice."""
    command = ("generate", str(_trained(place)), "--prompt", "def main(", "--tokens", "32")
    first, second = (_longhaul(place, *command, "--temperature", "0") for _ in range(2))
    faults = [] if first.strip() else ["printed nothing"]
    if first != second:
        faults.append(f"found {second!r}, wanted {first!r} again")
    return {"printed": first[-_TAIL:], "faults": faults}


def export(_: None, place: Place) -> dict[str, Any]:
    """`longhaul export` compares the logits of what it wrote with the run's."""
    out = _longhaul(place, "export", str(_trained(place)), str(place.scratch / "exported"))
    return {"printed": out[-_TAIL:], "faults": []}


def doctor(_: None, place: Place) -> dict[str, Any]:
    """What it finds on this machine for the small run."""
    _prepared(place)
    out = _longhaul(place, "doctor", str(place.scratch / "small.yaml"))
    return {"printed": out[-2 * _TAIL :], "faults": []}


def _train(precision: str, *settings: str) -> tuple[str, ...]:
    return ("train", "small.yaml", f"trainer.precision={precision}", *settings)


def _tokens_per_update(place: Place) -> int:
    return _MOST_DEVICES * _SIZES[place.device]["context"]


def _trained(place: Place) -> Path:
    """A finished run, trained at the first call in a scratch folder."""
    _reference(place, "bf16-mixed")
    return place.scratch / (place.scratch / "reference-bf16-mixed.name").read_text()


def _reference(place: Place, precision: str) -> list[float]:
    """The losses of one device; it trains at the first call in a scratch folder."""
    named = place.scratch / f"reference-{precision}.name"
    if not named.exists():
        name = f"reference-{precision}"
        _longhaul(place, *_train(precision, "trainer.strategy=single", f"name={name}"))
        _keep_reference(place, precision, name)
    return [one["curves/train_loss"] for one in _journal(place, named.read_text())]


def _keep_reference(place: Place, precision: str, name: str) -> None:
    (place.scratch / f"reference-{precision}.name").write_text(name)


def _prepared(place: Place) -> None:
    """Write the config and the corpus, this project's own code, at the first call."""
    config = place.scratch / "small.yaml"
    if config.exists():
        return
    sizes = _SIZES[place.device]
    text = place.scratch / "code.txt"
    text.write_text("".join(file.read_text(encoding="utf-8") for file in source_files(".py")))
    _run(
        *(place, "prepare", "text", str(text), str(place.scratch / "corpus")),
        *("--doc-tokens", str(sizes["context"]), "--docs-per-shard", "8"),
    )
    update = _tokens_per_update(place)
    budget = _UPDATES * update
    config.write_text(
        _CONFIG.format(
            folder=place.scratch, update=update, budget=budget, half=budget // 2, **sizes
        )
    )


def _longhaul(place: Place, *arguments: str) -> str:
    """Run a command on the small run, and return what it printed."""
    _prepared(place)
    return _run(place, *arguments)


def _run(place: Place, *arguments: str) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        _arguments(*arguments), **_surroundings(place), capture_output=True, text=True
    )
    if done.returncode:
        command = " ".join(arguments)
        raise CommandError(
            f"`longhaul {command}` ended with status {done.returncode}: "
            f"{(done.stderr or done.stdout)[-_TAIL:]}"
        )
    return done.stdout


def _arguments(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "longhaul.pipeline.cli", *arguments]


def _surroundings(place: Place) -> dict[str, Any]:
    """Folder and environment of a command."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)
    }
    # The ranks that a command starts must not import from the folder they run in either.
    return {"cwd": place.scratch, "env": environment | {"PYTHONSAFEPATH": "1"}}


def _journal(place: Place, name: str) -> list[dict[str, float]]:
    """The values of each update of a run, so far."""
    file = place.scratch / name / "logs" / "metrics.jsonl"
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")  # A last line may not be complete yet.
    lines = [json.loads(line) for line in whole.splitlines()]
    return [
        {key: float(value) for key, value in line["values"].items()}
        for line in lines
        if line["kind"] == "train"
    ]


def _sound(losses: list[float]) -> list[str]:
    if losses and all(map(math.isfinite, losses)) and losses[-1] < losses[0]:
        return []
    return [f"losses: found {losses}, wanted finite ones that fall"]


def _unlike(losses: list[float], wanted: list[float], precision: str) -> list[str]:
    """Where losses are too far from those of the reference."""
    if len(losses) != len(wanted):
        return [f"updates: found {len(losses)}, wanted {len(wanted)}"]
    for number, (one, other) in enumerate(zip(losses, wanted, strict=True), 1):
        if not abs(one - other) <= _TOLERANCE[precision] * abs(other):
            return [f"loss of update {number}: found {one}, wanted {other} as on one device"]
    return []
