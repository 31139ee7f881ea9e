"""The file DONE, which may come from another machine."""

import os
from pathlib import Path

import pytest

from longhaul.pipeline.runs.done import Finished
from longhaul.pipeline.runs.folder import RunFolder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.finished() is None
    run.mark_finished(Finished(3, 512, True))
    assert run.finished() == Finished(3, 512, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found no JSON, it is empty; wanted JSON"),
        ("[3, 512, true]", "found .3, 512, True., wanted an object"),
        ('{"step": 3, "tokens": 512}', "is_tracked: found nothing, wanted a value"),
        ('{"step": "3", "tokens": 512, "is_tracked": true}', "step: found '3', wanted a valid int"),
        ('{"step": 3, "tokens": -1, "is_tracked": true}', "tokens: found -1, wanted greater"),
        ('{"step": 3, "tokens": 512, "is_tracked": 1}', "is_tracked: found 1, wanted a valid bool"),
        ("[" * 5000, "recursion limit exceeded"),
    ],
)
def test_another_content_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.done_file.write_text(content)
    with pytest.raises(ValueError, match=f"^{run.done_file}: [^\n]*{message}[^\n]*$"):
        run.finished()


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    os.mkfifo(run.done_file)
    with pytest.raises(ValueError, match="DONE: found a FIFO, wanted a regular file"):
        run.finished()
