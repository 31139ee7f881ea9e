"""Small files on a disk that is full."""

import errno
import os
from pathlib import Path

import pytest

from longhaul.datamodules.files.atomic import write_atomically


def test_a_full_disk_leaves_the_old_file_alone_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "DONE"
    write_atomically(file, "before")

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="DONE cannot be written: No space left on device"):
        write_atomically(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]
    assert file.read_text() == "before"


def test_no_link_in_the_place_of_the_temporary_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    file = tmp_path / "run" / "DONE"
    file.parent.mkdir()
    file.symlink_to(tmp_path / "precious")
    file.with_name(f".DONE.{os.getpid()}").symlink_to(tmp_path / "precious")
    write_atomically(file, "after")
    assert (tmp_path / "precious").read_text() == "precious"
    assert file.read_text() == "after"
    assert not file.is_symlink()
