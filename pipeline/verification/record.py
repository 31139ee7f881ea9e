"""The file of results, which a later command goes on with."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json, to_json

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import one_line, parse_json, read_regular, shown
from longhaul.pipeline.verification.machine import Machine

FORMAT = 1
_MOST_ATTEMPTS = 2
_MOST_BYTES = 256 << 20
_LARGEST = 1e100
# Times, rates and sizes, which are compared with others.
_MEASURED = re.compile(r"(^|_)(ms|tflops|peak_bytes|allowed_bytes)(_graph)?$")
_HARMLESS = ("passed", "skipped", "unavailable")

# What a machine must have in common with the one that began the file.
_SAME = ("device", "name", "devices", "driver", "versions", "code")


@dataclass(frozen=True)
class _Piece:
    began: str
    seconds: float


@dataclass(frozen=True)
class _Entry:
    status: Literal["passed", "skipped", "unavailable", "failed", "crashed", "timed out", "begun"]
    attempts: Annotated[int, Field(ge=1, le=1000)] | None = None
    reason: str | None = None
    seconds: float | None = None
    faults: list[str] = field(default_factory=list)
    result: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        needed = {"begun": "attempts", "skipped": "reason"}.get(self.status)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"{needed}: found nothing, wanted a value")
        for name, value in (self.result or {}).items():
            if not _MEASURED.search(name) or value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < _LARGEST:
                raise ValueError(f"result.{name}: found {shown(value)}, wanted a number, 0 or more")


@dataclass(frozen=True)
class _Stored:
    machine: Machine
    pieces: list[_Piece]
    results: dict[str, _Entry]
    targets: list[dict[str, Any]]


class Record:
    """All results so far. Every change is on disk at once."""

    def __init__(self, path: Path, machine: Machine) -> None:
        """Go on with a file, or begin one.

        Raises:
            ValueError: the file is no record, or one of another machine, versions or code.
        """
        self.path = path
        self.machine: dict[str, Any] = json.loads(json.dumps(asdict(machine)))
        self.pieces: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}  # by the keys of checks
        self.targets: list[dict[str, Any]] = []
        if path.exists():
            stored = read_record(path)
            self._check_same(stored["machine"])
            self.pieces, self.results = stored["pieces"], stored["results"]
        self._started = time.monotonic()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.pieces.append({"began": now, "seconds": 0.0})
        for key in [key for key, one in self.results.items() if one["status"] == "skipped"]:
            del self.results[key]  # Today it may find what it needs.
        for one in self.results.values():
            if one["status"] == "begun" and one["attempts"] >= _MOST_ATTEMPTS:
                reason = f"did not end in {one['attempts']} pieces"
                one |= {"status": "crashed", "faults": [reason]}
        self._write()

    def has(self, key: str) -> bool:
        """Whether a check has run, or was skipped in this piece."""
        return self.results.get(key, {}).get("status") not in (None, "begun")

    @property
    def num_run(self) -> int:
        """Checks that have run to an end."""
        return sum(one["status"] not in ("begun", "skipped") for one in self.results.values())

    @property
    def has_passed(self) -> bool:
        """Whether nothing of this project that ran has failed."""
        return all(one["status"] in _HARMLESS for one in self.results.values())

    def skip(self, key: str, reason: str) -> None:
        """Note that a check cannot run here; `finish` or the next result writes it."""
        self.results[key] = {"status": "skipped", "reason": reason}

    def begin(self, keys: Iterable[str]) -> None:
        """Note that checks are about to begin: they may end this command, or the machine."""
        for key in keys:
            attempts = self.results.get(key, {}).get("attempts", 0) + 1
            self.results[key] = {"status": "begun", "attempts": attempts}
        self._write()

    def forget_attempts(self) -> None:
        """Forget the last attempt at what has not ended: this command, and not the check, ends."""
        for key in [key for key, one in self.results.items() if one["status"] == "begun"]:
            self.results[key]["attempts"] -= 1
            if not self.results[key]["attempts"]:
                del self.results[key]
        self._write()

    def end(self, key: str, status: str, **details: Any) -> None:
        """Keep what became of a check."""
        self.results.pop(key, None)  # It stands in the order in which checks end.
        # JSON has no NaN.
        plain = from_json(to_json(details, inf_nan_mode="null", fallback=str))
        self.results[key] = {"status": status, **plain}
        self._write()

    def finish(self, targets: list[dict[str, Any]]) -> None:
        """Keep the targets that the results meet or miss."""
        self.targets = targets
        self._write()

    def _check_same(self, stored: dict[str, Any]) -> None:
        for name in _SAME:
            before, now = stored.get(name), self.machine[name]
            if before != now:
                raise ValueError(
                    f"--json: found {self.path}, begun with {name} {before}, wanted {now} as it is "
                    "now, or a new file"
                )

    def _write(self) -> None:
        self.pieces[-1]["seconds"] = round(time.monotonic() - self._started, 1)
        content = {
            "format": FORMAT,
            "machine": self.machine,
            "pieces": self.pieces,
            "results": self.results,
            "targets": self.targets,
        }
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """The content of a file of results.

    Raises ValueError, naming the file, if it is something else.
    """
    try:
        text = read_regular(path, _MOST_BYTES)
        content: dict[str, Any] = json.loads(text)
    except OSError as error:
        raise ValueError(f"--json: {error}, wanted a file of `longhaul verify`") from error
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise ValueError(f"--json: found {path} damaged ({reason}), wanted it whole") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"--json: found {path}, another file, wanted one of `longhaul verify`")
    parse_json(_Stored, json.dumps(content), f"--json: {path}")
    if set(content["machine"]) - {one.name for one in fields(Machine)}:
        raise ValueError(f"--json: found {path} with unknown entries, wanted those of this version")
    return content
