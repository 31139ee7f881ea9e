"""What tasks found, in a folder: TASK.json each, and results.json with the values of all."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from longhaul.pipeline.evaluation.task import Options, Task, TaskResult
from longhaul.pipeline.system.files import write_atomically

logger = logging.getLogger(__name__)


class Results:
    """One folder of results; its files are whole or not there."""

    def __init__(self, folder: Path, held_out: str) -> None:
        """`held_out` tells the text that tasks read where options name none."""
        self.folder = folder
        self._held_out = held_out
        self.summary = folder / "results.json"

    def values(self) -> dict[str, float]:
        """Of all tasks whose results are known."""
        records = map(_read, sorted(self.folder.glob("*.json")))
        return {
            name: value for found in records if found for name, value in found["values"].items()
        }

    def known(self, name: str, task: Task, options: Options) -> TaskResult | None:
        """What a task found earlier under the same options; None if it did not, or files went."""
        path = self._record(name)
        if not path.exists():
            return None
        record = _read(path)
        if record is None:
            logger.warning("%s is damaged: what it told is measured again", path)
            return None
        files = tuple(self.folder / file for file in record["files"])
        if record["options"] != self._deciding(task, options) or not all(map(Path.exists, files)):
            return None
        return TaskResult(record["values"], files)

    def take(self, name: str, found: TaskResult) -> TaskResult:
        """Put what a task found, files and all, in the place of what it found before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record(name).unlink(missing_ok=True)
        for file in found.files:
            write_atomically(self.folder / file.name, file.read_bytes())
        _write(self.summary, self.values() | found.values)
        return TaskResult(found.values, tuple(self.folder / file.name for file in found.files))

    def record(self, name: str, task: Task, options: Options, found: TaskResult) -> None:
        """What was taken is known from now on."""
        _write(
            self._record(name),
            {
                "options": self._deciding(task, options),
                "values": found.values,
                "files": [file.name for file in found.files],
            },
        )
        self.summarise()

    def summarise(self) -> None:
        """Write results.json anew from what each task left."""
        _write(self.summary, self.values())

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _deciding(self, task: Task, options: Options) -> dict[str, Any]:
        """The options that decide a task's result, as JSON has them; of files, what is in them."""
        found: dict[str, Any] = {}
        for name in task.decided_by:
            value = getattr(options, name)
            if name == "text":
                value = [hashlib.sha256(path.read_bytes()).hexdigest() for path in value]
                value = value or self._held_out
            found[name] = list(value) if isinstance(value, tuple) else value
        return found


def _read(path: Path) -> dict[str, Any] | None:
    """A task's record; None for any other file."""
    try:
        record = json.loads(path.read_bytes())
        is_record = isinstance(record["values"], dict) and isinstance(record["files"], list)
        return record if is_record and "options" in record else None
    except (ValueError, TypeError, KeyError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")
