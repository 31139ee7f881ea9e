"""A run folder of someone else's is harmless: every file in every hostile form, in all commands.

Files, processes and the network are watched by Python's audit hooks, by comparing what the user has
before and after, and by strace where it is installed. Where there are hundreds of cases, the wide
suite runs a share of them.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
from foreign import (
    STEP,
    Change,
    Sandbox,
    configs,
    files_of_run,
    journals,
    linked_folders,
    planted,
    replaced_files,
    stores,
)
from watched import Outcome, Watched

pytestmark = pytest.mark.wide

_LONGEST_LINE = 1500
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SETTINGS = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=320"),
    *("data.context=32", "data.validation_tokens=256", "data.workers=0"),
    *("optim.tokens_per_update=256", "trainer.micro_batch=4", "optim.schedule.warmup_tokens=256"),
    *("trainer.validate_every_tokens=512", "checkpoint.every_tokens=256"),
    *("data.manifest=shards/train", "data.validation_manifest=shards/validation"),
    *("name=foreign", "tracking.experiment=tests", "trainer.accelerator=cpu"),
)
_RUN = Path("runs", "foreign")
_BEGIN = ("train", "run/demo.yaml", *_SETTINGS)
# What reads a file of a run, in turn; a config is read by more.
_READERS = ("evaluate", "train", "status", "evaluate", "train", "average", "generate", "export")
_CONFIG_READERS = (
    *("evaluate", "train", "generate", "average", "export"),
    *("status", "plan", "config", "submit"),
)
_SHARE = 5  # no divisor of the number of forms or readers, so that each has its turn
_OTHERS = ("doctor", "begin", "start", "report", "export inside", "sweep")


def arguments(command: str, sandbox: Sandbox) -> list[str]:
    run, config = str(sandbox.run), str(sandbox.run / "config.yaml")
    return {
        "evaluate": ["evaluate", run, "--tasks", "bigram", "--again"],
        "train": ["train", config, "trainer.max_tokens=768"],
        "generate": ["generate", run, "--tokens", "2", "--prompt", "a"],
        "average": ["average", run, str(sandbox.out / "mean")],
        "export": ["export", run, str(sandbox.out / "exported")],
        "export inside": ["export", run, str(sandbox.run / "export")],
        "sweep": ["train", config, "--sweep", "trainer.seed=1,2", "--parallel", "2"],
        "status": ["status", run],
        "plan": ["plan", config],
        "config": ["config", config],
        "submit": ["submit", config, "--dry-run"],
        "doctor": ["doctor", config],
        "begin": [*_BEGIN, "name=other", "trainer.max_tokens=256"],
        "start": [*_BEGIN, "name=other", "trainer.max_tokens=256", "trainer.start_from=exported"],
        "report": ["report", "tests", str(sandbox.out / "report"), "--uri", _store(sandbox)],
    }[command]


def _store(sandbox: Sandbox) -> str:
    return f"sqlite:///{sandbox.project}/mlflow.db"


def _has_strace(folder: Path) -> bool:
    if shutil.which("strace") is None:
        return False
    probe = ["strace", "-f", "--seccomp-bpf", "-e", "trace=execve", "-o", str(folder / "probe")]
    return subprocess.run([*probe, "true"], capture_output=True).returncode == 0


class Machine:
    """A sandbox with the process that runs commands in it."""

    def __init__(self, folder: Path, trace: Path | None) -> None:
        self.sandbox = Sandbox(folder)
        self.trace = trace
        self.watched = Watched(self.sandbox.environment, trace)
        self.clean: dict[str, Outcome] = {}
        self._lines: list[str] = []
        self._hosts: set[str] = set()

    def run(self, command: str) -> Outcome:
        sandbox = self.sandbox
        out = sandbox.root / "printed"
        return self.watched.run(arguments(command, sandbox), sandbox.project, out)

    def faults(self, command: str, base: Path, change: Change) -> list[str]:
        """Everything that a command does with a hostile folder that it must not do."""
        sandbox = self.sandbox
        sandbox.begin(base)
        change(sandbox)
        before = sandbox.valuables()
        outcome = self.run(command)
        faults = list(self._bad_ends(command, outcome))
        faults += [f"wrote {path}" for path in self._outside(outcome.of("write"))]
        for kind in ("process", "network"):
            new = outcome.of(kind) - self.clean[command].of(kind)
            faults += [f"{kind} {what}" for what in sorted(new)]
        if sandbox.valuables() != before:
            faults.append("the user's files have changed")
        return [*faults, *(f"{path} has the user's secret" for path in sandbox.leaked())]

    def _outside(self, paths: Iterable[str]) -> list[str]:
        allowed, made = self.sandbox.writable, self.sandbox.made
        return sorted(path for path in paths if not path.startswith(allowed) and path not in made)

    def _bad_ends(self, command: str, outcome: Outcome) -> Iterator[str]:
        text = outcome.text
        if outcome.status is None:
            yield "did not end"
        elif outcome.status < 0 or outcome.status not in (0, 1, 2, 69, 73, 75):
            yield f"status {outcome.status}: {text[-300:]!r}"
        if "Traceback (most recent call last)" in text:
            yield f"a traceback: {text[-1500:]}"
        if outcome.status and command != "doctor" and "longhaul: " not in text:
            yield f"no line: {text[-300:]!r}"
        if found := _CONTROL.search(text):
            yield f"printed {found[0]!r}: {text[max(0, found.start() - 60) : found.end() + 60]!r}"
        if (longest := max(map(len, text.splitlines()), default=0)) > _LONGEST_LINE:
            yield f"a line of {longest} characters"

    def _new_lines(self) -> list[str]:
        """What strace has seen since the last call."""
        if self.trace is None:
            return []
        lines = self.trace.read_text(errors="replace").splitlines()
        new, self._lines = lines[len(self._lines) :], lines
        return new

    def mark_clean(self) -> None:
        """Take what was traced so far as what clean folders bring about."""
        for line in self._new_lines():
            self._hosts.update(re.findall(r"^\d+ +connect.*inet_addr\(\"([^\"]*)\"", line))

    def traced(self) -> list[str]:
        """What strace saw written, connected to or started outside of what is allowed."""
        allowed = self.sandbox.writable
        found = set()
        for line in self._new_lines():
            call = re.match(r"\d+ +(\w+)\((.*)", line)
            if call is None or ("= -1 " in line and call[1] != "connect"):
                continue
            name, rest = call.groups()
            if name == "connect" and "AF_INET" in rest:
                host = re.search(r'inet_addr\("([^"]*)"', rest)
                # `doctor` asks this machine too, but not at the port of the hostile addresses.
                if host is None or host[1] not in self._hosts or "htons(9)" in rest:
                    found.add(line)
            if name in ("open", "openat") and not re.search("O_WRONLY|O_RDWR|O_CREAT", rest):
                continue
            if name in ("open", "openat", "creat", "truncate", "unlink", "unlinkat", "chmod"):
                path = re.match(r'(?:[^"]*?<([^>]*)>, )?"([^"]*)"', rest)
                if path is not None:
                    whole = path[2] if path[2].startswith("/") else f"{path[1]}/{path[2]}"
                    if not whole.startswith(allowed) and str(self.sandbox.home) in whole:
                        found.add(line)
        return sorted(found)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of two updates, its data and its database."""
    folder = tmp_path_factory.mktemp("base")
    machine = Machine(folder / "machine", None)
    project = machine.sandbox.project
    project.mkdir()
    (project / "text.txt").write_text("A short text, again and again. " * 400)
    prepare = ["prepare", "text", "text.txt", "shards", "--doc-tokens", "64"]
    train = ["train", "run/demo.yaml", *_SETTINGS, "trainer.max_tokens=512"]
    export = ["export", "runs/foreign", "exported"]
    for command in ([*prepare, "--validation-fraction", "0.2"], train, export):
        outcome = machine.watched.run(command, project, folder / "printed")
        assert outcome.status == 0, outcome.text
    machine.watched.close()
    assert (project / "runs" / "foreign" / "checkpoints" / STEP).is_dir()
    return project


@pytest.fixture(scope="module")
def machines(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Two, that work at the same time."""
    folder = tmp_path_factory.mktemp("machines")
    has_strace = _has_strace(folder)

    def make(name: str) -> Machine:
        return Machine(folder / name, folder / f"{name}.trace" if has_strace else None)

    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(make, ("a", "b"))]
        for machine in both:
            for command in (*_CONFIG_READERS, *_OTHERS):
                machine.sandbox.begin(base)
                machine.clean[command] = outcome = machine.run(command)
                assert outcome.status in ((0, 1, 2) if command in ("doctor", "report") else (0,)), (
                    command,
                    outcome.text,
                )
                assert not machine._outside(outcome.of("write")), command
            machine.mark_clean()
    yield both
    for machine in both:
        machine.watched.close()


Case = tuple[str, str, str, Change]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.soak)], ids=["share", "whole"])
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether all cases of a test run, or a share of them."""
    return bool(request.param)


def _check(machines: list[Machine], base: Path, cases: list[Case]) -> None:
    """Run all cases, on both machines, and show every fault."""
    faults: list[str] = []

    def work(machine: Machine, share: list[Case]) -> None:
        for command, name, form, change in share:
            found = machine.faults(command, base, change)
            faults.extend(f"{command}, {name}, {form[:60]}: {fault}" for fault in found)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, machines, (cases[::2], cases[1::2])))
    for machine in machines:
        faults += machine.traced()
    assert not faults, f"{len(faults)} of {len(cases)} cases:\n" + "\n".join(faults[:400])


def test_a_clean_folder_is_evaluated_into_the_database_beside_it(
    machines: list[Machine], base: Path
) -> None:
    machine = machines[0]
    machine.sandbox.begin(base)
    outcome = machine.run("evaluate")
    assert "which you have not named" not in outcome.text
    assert list((machine.sandbox.project / "mlruns").rglob("results.json"))


def test_every_file_of_a_run_in_every_form(
    machines: list[Machine], base: Path, whole: bool
) -> None:
    run = base / _RUN
    turn = cycle(_READERS)
    files = [*replaced_files(_RUN, files_of_run(run)), *linked_folders(_RUN)]
    cases = [(next(turn), *file) for file in files]
    # What all commands read, and what these two write.
    cases += [(command, *file) for file in files for command in _also(*file[:2])]
    _check(machines, base, cases if whole else cases[::_SHARE])


def _also(name: str, form: str) -> tuple[str, ...]:
    if name == "config.yaml":
        return ("plan", "config", "submit")
    is_written = form.startswith("link to") and "/" in name and name.startswith("logs")
    return ("evaluate", "train") if is_written else ()


def test_every_place_where_an_export_or_a_sweep_writes(machines: list[Machine], base: Path) -> None:
    _check(machines, base, list(planted(_RUN.parent)))


def test_every_key_of_a_config_with_every_hostile_value(
    machines: list[Machine], base: Path, whole: bool
) -> None:
    turn = cycle(_CONFIG_READERS[2:])
    cases: list[Case] = []
    for number, (name, form, change) in enumerate(configs()):
        names = {"evaluate", "train", next(turn)}
        if name.startswith("config slurm"):
            names.add("submit")
        if name.startswith(("config data", "config tracking.uri")):
            names |= {"doctor", "generate", "submit"}
        turns = ["submit"] if name.startswith("config slurm") else sorted(names)
        readers = sorted(names) if whole else [turns[number % len(turns)]]
        cases += [(command, name, form, change) for command in readers]
    _check(machines, base, cases)


def test_no_line_of_a_journal_sends_a_file_away(machines: list[Machine], base: Path) -> None:
    cases = [
        (command, name, form, change)
        for name, form, change in journals()
        for command in (("evaluate",) if "evaluation" in name else ("train", "status"))
    ]
    _check(machines, base, cases)


def test_every_file_of_data_and_of_an_export_in_every_form(
    machines: list[Machine], base: Path, whole: bool
) -> None:
    cases: list[Case] = []
    for command, folder in (
        *(("begin", "shards/train"), ("evaluate", "shards/validation"), ("start", "exported")),
    ):
        names = [path.name for path in (base / folder).iterdir() if path.suffix != ".py"]
        cases += [(command, *file) for file in replaced_files(Path(folder), sorted(names))]
    _check(machines, base, cases if whole else cases[::_SHARE])


def test_every_text_and_artifact_of_a_store_that_is_reported(
    machines: list[Machine], base: Path
) -> None:
    _check(machines, base, [("report", *store) for store in stores()])
