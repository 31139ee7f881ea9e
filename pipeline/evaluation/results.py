"""The folder with the results of tasks: TASK.json for each, results.json with all numbers."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import PlainName, parse_json, read_regular
from longhaul.pipeline.evaluation.options import TaskOptions
from longhaul.pipeline.evaluation.task import TaskResult

logger = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class _Record:
    """The file TASK.json."""

    options: dict[str, Any]
    values: dict[str, float]
    files: list[PlainName]


class Results:
    """A folder of results. Each of its files is complete or absent."""

    def __init__(self, folder: Path, validation_text: str) -> None:
        """`validation_text` identifies the text that tasks read when no --text is given."""
        self.folder = folder
        self._validation_text = validation_text
        self.summary = folder / "results.json"

    def values(self) -> dict[str, float]:
        """The numbers of all tasks that have complete results."""
        records = map(_read, sorted(self.folder.glob("*.json")))
        return {
            name: value for record in records if record for name, value in record.values.items()
        }

    def stored(self, name: str, options: TaskOptions) -> TaskResult | None:
        """A task's result under the same options, if it is there with all its files."""
        path = self._record(name)
        if not path.exists():
            return None
        record = _read(path)
        if record is None:
            logger.warning("%s is damaged: its task is measured again", path)
            return None
        files = tuple(self.folder / file for file in record.files)
        if record.options != self._deciding_options(options) or not all(map(Path.exists, files)):
            return None
        return TaskResult(record.values, files)

    def store(self, name: str, result: TaskResult) -> TaskResult:
        """Replace a task's files by new ones; only `mark_complete` makes them its result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record(name).unlink(missing_ok=True)
        for file in result.files:
            write_atomically(self.folder / file.name, file.read_bytes())
        _write(self.summary, self.values() | result.values)
        return TaskResult(result.values, tuple(self.folder / file.name for file in result.files))

    def mark_complete(self, name: str, options: TaskOptions, result: TaskResult) -> None:
        """Write TASK.json, from which on `stored` returns this result."""
        _write(
            self._record(name),
            {
                "options": self._deciding_options(options),
                "values": result.values,
                "files": [file.name for file in result.files],
            },
        )
        self.summarise()

    def summarise(self) -> None:
        """Write results.json from the TASK.json of all tasks."""
        _write(self.summary, self.values())

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _deciding_options(self, options: TaskOptions) -> dict[str, Any]:
        """The options as JSON; for files, digests of their content."""
        deciding: dict[str, Any] = {}
        for name, value in vars(options).items():
            if name == "text":
                value = [hashlib.sha256(path.read_bytes()).hexdigest() for path in value]
                value = value or self._validation_text
            deciding[name] = list(value) if isinstance(value, tuple) else value
        return deciding


def _read(path: Path) -> _Record | None:
    """The content of a TASK.json; None for any other file, or a damaged one."""
    try:
        return parse_json(_Record, read_regular(path, _MOST_BYTES), path)
    except ValueError:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")
