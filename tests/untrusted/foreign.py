"""A run folder as a stranger may send it, and everything a stranger may put into its files."""

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SECRET = "only the user may read this"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
STEP = "step-000000002"
Change = Callable[["Sandbox"], None]


@dataclass(frozen=True)
class Sandbox:
    """A user's machine in small: the home with files of value, and a project of someone else's."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home", "tmp", "out", "state", "plots"):
            (self.root / name).mkdir(parents=True)
        (self.home / "precious.txt").write_text(SECRET * 3)
        (self.home / ".profile").touch()
        self.environment.update(
            {
                "HOME": str(self.home),
                "TMPDIR": str(self.root / "tmp"),
                "XDG_STATE_HOME": str(self.root / "state"),
                # Compiled C++, which is made once.
                "XDG_CACHE_HOME": str(CACHE),
                "MPLCONFIGDIR": str(self.root / "plots"),
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "80",
            }
        )

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def project(self) -> Path:
        return self.root / "project"

    @property
    def run(self) -> Path:
        return self.project / "runs" / "foreign"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def writable(self) -> tuple[str, ...]:
        """What begins the paths that commands may write: the run, its database, scratch."""
        store = self.project / "mlflow.db"
        inside = (self.project / "runs", self.project / "mlruns", self.out, self.root / "tmp")
        folders = (
            *inside,
            self.root / "plots",
            self.root / "state",
            "/dev/shm",
            "/proc/self",
            CACHE,
        )
        return (*(f"{folder}/" for folder in folders), str(store), "/dev/null")

    @property
    def made(self) -> tuple[str, ...]:
        """Folders that are made where they are missing."""
        return (str(self.project), *(one.rstrip("/") for one in self.writable))

    def begin(self, base: Path) -> None:
        """The project anew, and nothing of the case before."""
        for folder in (self.project, self.out):
            _remove(folder)
        shutil.copytree(base, self.project, symlinks=True)
        # The database is beside the run, and has been moved with it.
        with sqlite3.connect(self.project / "mlflow.db") as database:
            for table, key in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
                moved = (str(base), str(self.project))
                database.execute(f"UPDATE {table} SET {key} = replace({key}, ?, ?)", moved)
        self.out.mkdir()

    def valuables(self) -> dict[str, Any]:
        """All that the user has in their home: content, mode, and target of links."""
        return {
            str(path.relative_to(self.home)): (
                path.lstat().st_mode,
                path.lstat().st_mtime_ns,
                path.read_bytes() if path.is_file() else None,
            )
            for path in sorted(self.home.rglob("*"))
        }

    def leaked(self) -> list[str]:
        """Files with the user's secret that are not the user's own."""
        found = []
        for folder in (self.project / "mlruns", self.out):
            for path in folder.rglob("*") if folder.exists() else ():
                is_own = path.is_file() and not path.is_symlink()
                if is_own and path.stat().st_size < 1 << 24 and SECRET in _text(path):
                    found.append(str(path))
        return found


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _device(path: Path, sandbox: Sandbox) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except OSError:  # only root may make one
        path.symlink_to("/dev/zero")


def _sparse(path: Path, sandbox: Sandbox) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


FORMS: dict[str, Callable[[Path, Sandbox], None]] = {
    "link to a file": lambda path, sandbox: path.symlink_to(sandbox.home / "precious.txt"),
    "link to a new file": lambda path, sandbox: path.symlink_to(sandbox.home / "new.txt"),
    "link to zero": lambda path, sandbox: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, sandbox: os.mkfifo(path),
    "device": _device,
    "folder": lambda path, sandbox: path.mkdir(),
    "huge": _sparse,
    "empty": lambda path, sandbox: path.touch(),
    "control": lambda path, sandbox: path.write_text('{"\x1b[2J": "\x1b]0;x\x07\u202e"}\n'),
    "bytes": lambda path, sandbox: path.write_bytes(b"\xff\xfe\0{\n"),
    "digits": lambda path, sandbox: path.write_text("9" * 5000),
    "nested": lambda path, sandbox: path.write_text("[" * 100_000),
}


def _replaced(name: Path, form: str) -> Change:
    def change(sandbox: Sandbox) -> None:
        path = sandbox.project / name
        _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "link to home":
            path.symlink_to(sandbox.home)
        else:
            FORMS[form](path, sandbox)

    return change


# Those that are not there in a run that has ended, or are written by an evaluation. What the files
# STOP, SAVE and PROFILE do is tested with a training that goes on.
_MORE_FILES = (
    *("STOPPED", "slurm/jobs.jsonl", "slurm/config.yaml"),
    *("logs/evaluation.jsonl", "logs/evaluation.jsonl.lock", "logs/run_key.lock"),
    *(f"evaluation/{STEP}/{name}" for name in ("positions.json", "results.json", "positions.csv")),
)
_FOLDERS = ("logs", "evaluation", f"evaluation/{STEP}", "checkpoints", "data", "slurm", "export")
# Below the folder of runs: what an export into the run writes on its way, and what a sweep writes.
_EXPORTED = ("foreign/export", "foreign/.export.unfinished", "foreign/.export.unfinished/.lock")
_SWEPT = tuple(f"foreign-sweep{name}" for name in ("", "/configs", "/logs", "/mlflow_run_id"))


def files_of_run(run: Path) -> list[str]:
    """The files of a run, and those that it may have."""
    own = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    # One checkpoint will do.
    own = [name for name in own if not name.startswith("checkpoints/") or STEP in name]
    return sorted({*own, *_MORE_FILES})


def replaced_files(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, str, Change]]:
    """Each file in each hostile form: the file, the form, and what makes it.

    Args:
        folder: below the project.
        names: of its files.
    """
    for name in names:
        for form in FORMS:
            yield name, form, _replaced(folder / name, form)


def linked_folders(run: Path) -> Iterator[tuple[str, str, Change]]:
    """Each folder of a run as a link to the user's home."""
    for name in _FOLDERS:
        yield name, "link", _replaced(run / name, "link to home")


def planted(runs: Path) -> Iterator[tuple[str, str, str, Change]]:
    """What an export and a sweep write, in forms that are no files: the command comes first."""
    for command, names in (("export inside", _EXPORTED), ("sweep", _SWEPT)):
        for name in names:
            for form in ("link to home", "link to a file", "link to a new file", "FIFO"):
                yield command, name, form, _replaced(runs / name, form)


def _set(key: str, value: Any) -> Change:
    def change(sandbox: Sandbox) -> None:
        file = sandbox.run / "config.yaml"
        config = yaml.safe_load(file.read_text())
        *parts, last = key.split(".")
        inner = config
        for part in parts:
            inner = inner[part]
        text = json.dumps(value).replace("HOME", str(sandbox.home))
        inner[last] = json.loads(text.replace("SHARDS", str(sandbox.project / "shards")))
        file.write_text(yaml.safe_dump(config))
        if key == "data.manifest":  # else the copy of the manifest in the folder is read
            _remove(sandbox.run / "data")

    return change


_COMMAND = "pipe:touch HOME/pwned; cat SHARDS/train/manifest.json"
_LOCATIONS = (
    *(_COMMAND, "pipe:cat SHARDS/train/manifest.json", "http://127.0.0.1:9/manifest.json"),
    *("http://127.0.0.1:9/'; touch HOME/pwned; '/manifest.json", "s3://bucket/manifest.json"),
    *("scp://host/manifest.json", "hf://a/b/manifest.json", "file:///dev/zero", "/dev/zero"),
    *("HOME/precious.txt", "\x1b[2J", "a\nb", "x" * 5000, "../" * 60 + "dev/zero"),
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "data.manifest": _LOCATIONS,
    "data.validation_manifest": _LOCATIONS,
    "data.cache_dir": ("HOME/cache", _COMMAND),
    "trainer.start_from": (_COMMAND, "/dev/zero", "HOME", "http://127.0.0.1:9/"),
    "tracking.uri": (
        *("http://127.0.0.1:9", "http://me:word@127.0.0.1:9/", "sqlite:///HOME/other.db"),
        *("sqlite:///HOME/.profile", "sqlite:///HOME/precious.txt", "sqlite:///../../.profile"),
        *("sqlite:///mine.db", "sqlite:////dev/zero", "https://127.0.0.1:9/\x1b[2J"),
    ),
    "tracking.experiment": ("\x1b[2J\x1b]0;x\x07", "../../x", "x" * 5000),
    "tracking.parent_run_id": ("../../x", "\x1b[2J"),
    "root": ("HOME", "HOME/\x1b[2J", "/dev"),
    "name": ("../../home", "\x1b[2J", ".."),
    "slurm.extra": (["--output=HOME/.profile"], ["--wrap=touch HOME/pwned"], ["-o\nrm -rf ."]),
    "slurm.modules": (["../theirs"], ["HOME/theirs"], ["$(touch HOME/pwned)"]),
    "slurm.container": ("HOME/theirs.sqsh", "\x1b[2J"),
    "slurm.environment": (["LD_PRELOAD=HOME/theirs.so"], ["A=$(touch HOME/pwned)"]),
    "slurm.account": ("$(touch HOME/pwned)", "x\ntouch HOME/pwned", "\x1b[2J"),
    "slurm.then": (["touch HOME/pwned"], ["evaluate; touch HOME/pwned"]),
    "evaluation.tasks": (["../../x"], ["\x1b[2J"]),
    "model.attention.kind": ("os", "../../x", "\x1b[2J"),
    "trainer.seed": (-1, 1 << 32, 1 << 200),
    "trainer.devices": (1 << 15,),
    "\x1b[2J": (1,),
    "inherits": (["HOME/precious.txt"], ["/dev/zero"]),
}


def configs() -> Iterator[tuple[str, str, Change]]:
    """Each key of a stored config with each hostile value."""
    for key, values in _VALUES.items():
        for value in values:
            yield f"config {key}", repr(value), _set(key, value)


def _in_database(statement: str, *values: str) -> Change:
    def change(sandbox: Sandbox) -> None:
        with sqlite3.connect(sandbox.project / "mlflow.db") as database:
            database.execute("PRAGMA ignore_check_constraints = 1")
            database.execute(
                statement, [value.replace("HOME", str(sandbox.home)) for value in values]
            )

    return change


def _artifact(name: str, form: str) -> Change:
    def change(sandbox: Sandbox) -> None:
        (folder,) = (sandbox.project / "mlruns" / "tests").glob("*/artifacts")
        _replaced((folder / name).relative_to(sandbox.project), form)(sandbox)

    return change


_TEXTS = ("\x1b[2J\x1b]0;x\x07", "<script>x</script>", "=1+1", "../../../HOME", "x" * 5000)
_STORED = {
    "name": "UPDATE runs SET name = ?",
    "status": "UPDATE runs SET status = ?",
    "folder": "UPDATE runs SET artifact_uri = ?",
    "tags": "UPDATE tags SET value = ?",
    "params": "UPDATE params SET value = ?",
    "names of metrics": "UPDATE latest_metrics SET key = ? WHERE key = 'curves/train_loss'",
    "metrics": "UPDATE metrics SET value = ?",
    "profiles": "UPDATE datasets SET dataset_profile = ?",
    "digests": "UPDATE datasets SET digest = ?",
}


def stores() -> Iterator[tuple[str, str, Change]]:
    """A database with hostile texts in its columns, and each artifact in each hostile form."""
    for name, statement in _STORED.items():
        for text in (*_TEXTS, "HOME", "file:///dev"):
            yield f"{name} in mlflow.db", repr(text), _in_database(statement, text)
    for name in ("config.yaml", "environment.json", "evaluation", f"evaluation/{STEP}/context.csv"):
        for form in (*FORMS, "link to home"):
            yield f"artifact {name}", form, _artifact(name, form)
    yield from replaced_files(Path(), ["mlflow.db"])


def _line(**fields: Any) -> str:
    return json.dumps({"time_ms": 1, **fields})


def _with_lines(name: str, *lines: str) -> Change:
    def change(sandbox: Sandbox) -> None:
        (sandbox.run / "link.txt").symlink_to(sandbox.home / "precious.txt")
        (sandbox.run / "linked").symlink_to(sandbox.home)
        (sandbox.run / "folder").mkdir()
        (sandbox.run / "folder" / "a.txt").symlink_to(sandbox.home / "precious.txt")
        text = "".join(f"{line}\n" for line in lines).replace("HOME", str(sandbox.home))
        with (sandbox.run / name).open("a") as file:
            file.write(text)

    return change


_SENT = (
    *("HOME/precious.txt", "../../../home/precious.txt", "link.txt", "linked", "folder", "."),
    *("linked/precious.txt", "logs/../../../../home/precious.txt", "", "a\0b", "\x1b[2J"),
)


def journals() -> Iterator[tuple[str, str, Change]]:
    """Lines of journals that would send files away, or take MLflow elsewhere."""
    for name in ("logs/evaluation.jsonl", "logs/metrics.jsonl"):
        for path in _SENT:
            line = _line(kind="artifact", number=900, path=path, folder="")
            yield f"artifact in {name}", path, _with_lines(name, line)
        for folder in ("../../../../home", "HOME", "/"):
            line = _line(kind="artifact", number=900, path="config.yaml", folder=folder)
            yield f"artifact to {name}", folder, _with_lines(name, line)
        others = [
            _line(kind="checkpoint", number=901, path="' OR '1'='1", step=1, values={}),
            _line(kind="checkpoint", number=902, path="HOME", step=1, values={}),
            _line(kind="tags", number=900, values={"\x1b[2J": "\x1b[2J", "mlflow.user": "x"}),
            _line(kind="datasets", number=900, datasets=[{"name": "x"}]),
            _line(kind="\x1b[2J", number=1),
            _line(kind="train", step=900, values={"curves/train_loss": "NaN"}),
        ]
        yield f"others in {name}", "", _with_lines(name, *others)
