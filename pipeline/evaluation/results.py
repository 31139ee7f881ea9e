"""What tasks found, in a folder: TASK.json each, and results.json with the values of all."""

import hashlib
import json
from pathlib import Path
from typing import Any

from longhaul.pipeline.atomic import write_atomically
from longhaul.pipeline.evaluation.task import Measured, Options, Task


class Results:
    """One folder of results; its files are whole or not there."""

    def __init__(self, folder: Path, held_out: str) -> None:
        """`held_out` tells the text that tasks read where options name none."""
        self.folder = folder
        self._held_out = held_out
        self.summary = folder / "results.json"

    def values(self) -> dict[str, float]:
        """Of all tasks done so far."""
        return json.loads(self.summary.read_text()) if self.summary.exists() else {}

    def known(self, name: str, task: Task, options: Options) -> Measured | None:
        """What a task found earlier under the same options; None if it did not, or files went."""
        path = self._record(name)
        if not path.exists():
            return None
        record = json.loads(path.read_text())
        files = tuple(self.folder / file for file in record["files"])
        if record["options"] != self._deciding(task, options) or not all(map(Path.exists, files)):
            return None
        return Measured(record["values"], files)

    def forget(self, name: str) -> None:
        """Drop what a task found, before its files are written anew."""
        path = self._record(name)
        if path.exists():
            gone = json.loads(path.read_text())["values"]
            _write(self.summary, {k: v for k, v in self.values().items() if k not in gone})
            path.unlink()

    def add(self, found: Measured) -> None:
        """Put what a task found among the values of all."""
        _write(self.summary, self.values() | found.values)

    def record(self, name: str, task: Task, options: Options, found: Measured) -> None:
        """What was added is known from now on, and its files are there."""
        _write(
            self._record(name),
            {
                "options": self._deciding(task, options),
                "values": found.values,
                "files": [file.name for file in found.files],
            },
        )

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


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")
