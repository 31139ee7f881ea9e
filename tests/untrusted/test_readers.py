"""Thousands of damaged and hostile files through every reader of files that come from outside.

Each is a valid file with a few mutations. A reader may accept it, or refuse it with a ValueError or
an OSError of one short line: nothing else, in bounded memory.
"""

import logging
import random
import resource
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from readers import READERS, Folder, Reader

pytestmark = pytest.mark.wide

LONGEST_LINE = 1500
SECONDS_PER_CASE = 60  # a guard against endless loops, not a measurement
MOST_GROWTH = 1 << 30  # bytes
# The fraction of the cases that a reader refuses, or it would take everything.
LEAST_REFUSED = 0.4
# These skip or show what is damaged, and go on.
LEAST_REFUSED_OF = {"run": 0.1, "results": 0.0, "status": 0.0}


@dataclass
class Tally:
    """What became of the cases of a reader."""

    cases: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


class TooSlowError(BaseException):
    """Not an Exception, which a reader might catch."""


def fuzz(reader: Reader, folder: Folder, cases_per_file: int, seed: int) -> Tally:
    """Mutate each file of a reader so many times, and read it."""
    tally = Tally()
    folder.mkdir(parents=True)
    reader.write(folder)
    valid = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader.read(folder)

    def ring(number: int, frame: object) -> None:
        raise TooSlowError

    before_fuzzing = signal.signal(signal.SIGALRM, ring)
    for name, mutate in reader.files.items():
        path = folder / name
        for case in range(cases_per_file):
            draw = random.Random(f"{seed} {folder.name} {name} {case}")
            content = mutate(draw, valid[path])
            path.write_bytes(content)
            reader.mend(folder)
            tally.cases += 1
            signal.alarm(SECONDS_PER_CASE)
            try:
                reader.read(folder)
            except (ValueError, OSError) as error:
                tally.refused += 1
                line = str(error)
                if not line or "\n" in line or len(line) > LONGEST_LINE:
                    tally.failures.append(f"{name}, case {case}: message {line[:2000]!r}")
            except BaseException:
                tally.failures.append(f"{name}, case {case}: {traceback.format_exc()}")
            finally:
                signal.alarm(0)
                for each, before in valid.items():
                    each.write_bytes(before)
    signal.signal(signal.SIGALRM, before_fuzzing)
    return tally


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("cases_per_file", [40, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", READERS)
def test_no_file_from_outside_brings_a_traceback(
    name: str, cases_per_file: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("longhaul").setLevel(logging.ERROR)
    before = peak_bytes()
    tally = fuzz(READERS[name], tmp_path / name, cases_per_file, seed=0)
    with capfd.disabled():
        print(
            f"\n{name}: {tally.cases} cases, {tally.refused} refused, "
            f"{len(tally.failures)} tracebacks"
        )
    assert not tally.failures, "\n\n".join(tally.failures[:5])
    assert tally.refused >= LEAST_REFUSED_OF.get(name, LEAST_REFUSED) * tally.cases
    assert peak_bytes() - before < MOST_GROWTH
