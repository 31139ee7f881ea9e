"""Files on a disk that is full, beside links, and written by two processes at once."""

import errno
import os
from pathlib import Path

import pytest

from longhaul.datamodules.files.atomic import whole_file, write_atomically


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
    with pytest.raises(OSError, match="No space left on device: ") as caught, whole_file(file):
        pass
    assert caught.value.filename == str(file)
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]
    assert file.read_text() == "before"


def test_what_closing_a_file_cannot_write_names_it(tmp_path: Path) -> None:
    def write_to_a_full_disk() -> None:
        with whole_file(tmp_path / "DONE") as file, open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), file.fileno())
            file.write(b"after")

    with pytest.raises(OSError, match="No space left on device") as caught:
        write_to_a_full_disk()
    assert caught.value.filename == str(tmp_path / "DONE")
    assert not list(tmp_path.iterdir())


def test_no_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("precious")
    file = tmp_path / "run" / "DONE"
    file.parent.mkdir()
    file.symlink_to(tmp_path / "precious")
    write_atomically(file, "after")
    assert file.read_text() == "after"
    assert not file.is_symlink()
    monkeypatch.setattr(os, "urandom", bytes)  # as if somebody had guessed the temporary name
    file.with_name(".DONE.00000000.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="DONE cannot be written: File exists"):
        write_atomically(file, "again")
    assert (tmp_path / "precious").read_text() == "precious"
    assert file.read_text() == "after"


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "DONE"
    with whole_file(file) as one:
        one.write(b"one")
        with whole_file(file) as other:
            other.write(b"other")
            assert not file.exists()
        assert file.read_bytes() == b"other"
    assert file.read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"]


def test_a_file_follows_the_umask(tmp_path: Path) -> None:
    write_atomically(tmp_path / "written", "")
    (tmp_path / "other").touch()
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_device_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[object] = []
    monkeypatch.setattr(os, "replace", lambda *paths: replaced.append(paths))
    message = r"^/dev/null cannot be written: it is a device, wanted a file"
    with pytest.raises(OSError, match=message):
        write_atomically(Path("/dev/null"), "x")
    assert not replaced
