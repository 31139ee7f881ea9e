"""The checks of the trainer: `longhaul` commands on a small model, each a process of its own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.machine import Machine, source_files
from longhaul.pipeline.verification.models import faults_of

# What `longhaul train` imports beyond PyTorch and jaxtyping. Without mlflow it trains too:
# its journal keeps what mlflow would be told.
_PACKAGES = (
    *("lightning", "numpy", "omegaconf", "psutil", "pydantic", "safetensors", "torchmetrics"),
    *("tqdm", "webdataset"),
)

_SECONDS = 300.0
_UPDATES = 8
_MOST_DEVICES = 8
# Losses of other strategies and numbers of ranks differ by rounding: on two CPUs by 6e-5 at most in
# bf16-mixed. Ranks that see half of the samples differ by 5e-3 in the first update.
_TOLERANCE = {"32-true": 1e-3, "bf16-mixed": 2e-3}
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
    settings: tuple[str, ...]
    precision: str


_ONE = ("trainer.strategy=single",)


def first_checks() -> list[Check]:
    """One training, on one device."""
    return [_training(Training(label="single", settings=_ONE, precision="bf16-mixed"))]


def remaining_checks(machine: Machine) -> list[Check]:
    """Every strategy that the devices allow, with every precision and with compiled blocks; then
    what follows a training.

    What needs no GPU to fail, such as a signal or an export, is for the tests.
    """
    trainings = [
        Training(label=label, settings=settings, precision=precision)
        for precision in ("bf16-mixed", "32-true")
        for label, settings in _settings(machine).items()
    ]
    checks = [
        _check("resume: to the bit under trainer.deterministic", resume_to_the_bit, None),
        _check("evaluate: one process", evaluate, 1, "matplotlib"),
        _check("generate: greedy, twice", generate, None),
        _check("doctor", doctor, None),
        _check(f"muon: single and fsdp on {_ranks(machine)}", muon, _ranks(machine)),
        *map(_training, trainings[1:]),
    ]
    if (ranks := _ranks(machine)) > 1:
        checks.append(_check(f"evaluate: {ranks} processes", evaluate, ranks, "matplotlib"))
    return checks


def _check(name: str, function: Any, argument: Any, *packages: str) -> Check:
    return Check(
        part="trainer",
        name=name,
        function=function,
        argument=argument,
        seconds=_SECONDS,
        needs=Needs(packages=(*_PACKAGES, *packages)),
    )


def _training(training: Training) -> Check:
    packages = ("deepspeed",) if training.label.startswith("deepspeed") else ()
    return _check(f"train: {training.label}, {training.precision}", train, training, *packages)


def _ranks(machine: Machine) -> int:
    """How many ranks train together: a power of two, since they share eight samples an update."""
    if machine.device == "cpu":
        return 2
    return 1 << (min(machine.devices, _MOST_DEVICES).bit_length() - 1)


def _settings(machine: Machine) -> dict[str, tuple[str, ...]]:
    """The settings of every training, by its label; `_ONE` is first."""
    ranks = _ranks(machine)
    devices = f"trainer.devices={ranks}"
    on = f"on {ranks} rank{'s' if ranks > 1 else ''}"
    found: dict[str, tuple[str, ...]] = {}
    for label, settings in (
        ("single", _ONE),
        (f"ddp {on}", ("trainer.strategy=ddp", devices)),
        (f"fsdp {on}", ("trainer.strategy=fsdp", devices)),
    ):
        found[label] = settings
        found[f"{label}, compiled"] = (*settings, "trainer.compile=true")
    if ranks >= 4:
        replicas = ("trainer.strategy=fsdp", "trainer.replicas=2", devices)
        found[f"fsdp, 2 replicas, {ranks} ranks"] = replicas
    for stage in (1, 2, 3):
        staged = ("trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}", devices)
        found[f"deepspeed {stage} {on}"] = staged
    if ranks > 1:
        parallel = ("trainer.strategy=ddp", f"trainer.context_parallel={ranks}", devices)
        found[f"context parallel {on}"] = parallel
    found["single, light"] = (*_ONE, "trainer.activation_checkpointing=light")
    found["single, recomputed"] = (*_ONE, "trainer.activation_checkpointing=1")
    return found


class CommandError(Exception):
    """A command that did not end as it should."""


def train(training: Training, place: Place) -> dict[str, Any]:
    """Train, and compare all losses with those of one device without compilation."""
    name = f"run-{time.monotonic_ns()}"
    if training.settings == _ONE:
        name = _reference_name(training.precision)
    started = time.monotonic()
    _longhaul(place, *_train(training.precision, *training.settings, f"name={name}"))
    seconds = time.monotonic() - started
    lines = _journal(place, name)
    losses = [one["curves/train_loss"] for one in lines]
    last = lines[-1] if lines else {}
    return {
        "settings": list(training.settings),
        "losses": losses,
        "seconds": round(seconds, 1),
        "tokens_per_second": last.get("train/tokens_per_second"),
        "peak_bytes": last.get("train/peak_memory_bytes"),
        "faults": [
            *faults_of(losses),
            *_unlike(losses, _reference(place, training.precision), training.precision),
        ],
    }


def resume_to_the_bit(_: None, place: Place) -> dict[str, Any]:
    """Under trainer.deterministic a break changes no bit of a loss, on GPUs too."""
    budget = _UPDATES * _tokens_per_update(place)
    command = _train("bf16-mixed", *_ONE, "trainer.deterministic=true")
    _longhaul(place, *command, "name=whole")
    _longhaul(place, *command, "name=broken", f"trainer.max_tokens={budget // 2}")
    _longhaul(place, *command, "name=broken")
    whole, broken = (
        [one["curves/train_loss"] for one in _journal(place, name)] for name in ("whole", "broken")
    )
    faults = [] if whole == broken else [f"losses: found {broken}, wanted {whole}"]
    return {"losses": broken, "faults": faults}


def muon(devices: int, place: Place) -> dict[str, Any]:
    """Muon's losses with its matrices sharded are those of one device, in bfloat16 too."""
    command = (*_train("bf16-mixed"), "optim.name=muon")
    _longhaul(place, *command, *_ONE, "name=muon")
    sharding = ("trainer.strategy=fsdp", f"trainer.devices={devices}")
    _longhaul(place, *command, *sharding, "name=muon-sharded")
    whole, sharded = (
        [one["curves/train_loss"] for one in _journal(place, name)]
        for name in ("muon", "muon-sharded")
    )
    faults = [*faults_of(whole), *_unlike(sharded, whole, "bf16-mixed")]
    return {"losses": sharded, "whole": whole, "faults": faults}


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
    return place.scratch / _reference_name("bf16-mixed")


def _reference(place: Place, precision: str) -> list[float]:
    """The losses of one device; it trains at the first call in a scratch folder."""
    name = _reference_name(precision)
    if not (place.scratch / name / "DONE").exists():
        _longhaul(place, *_train(precision, *_ONE, f"name={name}"))
    return [one["curves/train_loss"] for one in _journal(place, name)]


def _reference_name(precision: str) -> str:
    return f"reference-{precision}"


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
    done = subprocess.run(
        [sys.executable, "-P", "-m", "longhaul.pipeline.cli", *arguments],
        cwd=place.scratch,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        command = " ".join(arguments)
        raise CommandError(
            f"`longhaul {command}` ended with status {done.returncode}: "
            f"{(done.stderr or done.stdout)[-_TAIL:]}"
        )
    return done.stdout


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    # The ranks that a command starts must not import from the folder they run in either.
    return kept | {"PYTHONSAFEPATH": "1"}


def _journal(place: Place, name: str) -> list[dict[str, float]]:
    """The values of each update of a run."""
    lines = (place.scratch / name / "logs" / "metrics.jsonl").read_text().splitlines()
    return [
        {key: float(value) for key, value in line["values"].items()}
        for line in map(json.loads, lines)
        if line["kind"] == "train"
    ]


def _unlike(losses: list[float], wanted: list[float], precision: str) -> list[str]:
    """Where losses are too far from those of the reference."""
    if len(losses) != len(wanted):
        return [f"updates: found {len(losses)}, wanted {len(wanted)}"]
    for number, (one, other) in enumerate(zip(losses, wanted, strict=True), 1):
        if not abs(one - other) <= _TOLERANCE[precision] * abs(other):
            return [f"loss of update {number}: found {one}, wanted {other} as on one device"]
    return []
