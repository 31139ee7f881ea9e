"""The file DONE of a run folder: how the run finished. It is read without importing torch."""

from dataclasses import dataclass
from pathlib import Path

from longhaul.datamodules.files.untrusted import Count, parse_json, read_regular


@dataclass(frozen=True)
class Finished:
    """The contents of the file DONE."""

    step: Count
    tokens: Count
    is_tracked: bool  # whether everything has been uploaded to MLflow

    @property
    def is_imported(self) -> bool:
        """Whether the run has no update, but weights that others have trained."""
        return self.step == 0


def read_done(file: Path) -> Finished | None:
    """How a run finished, None without the file. ValueError if it holds something else."""
    if not file.exists():
        return None
    return parse_json(Finished, read_regular(file, 1 << 16), file)
