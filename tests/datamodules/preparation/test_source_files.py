import gzip
import os
import re
from pathlib import Path

import pytest

from longhaul.datamodules.preparation.source_files import files_in_validation, open_sources


def names(*sources: Path) -> list[str]:
    return sorted(name for name, _ in open_sources([str(source) for source in sources]).files)


def test_links_to_folders_are_followed_and_everything_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    (source / "sub").mkdir(parents=True)
    (elsewhere / "deep").mkdir(parents=True)
    (source / "sub" / "a.txt").write_text("a")
    (elsewhere / "b.txt").write_text("b")
    (elsewhere / "deep" / "c.txt").write_text("c")
    (elsewhere / "hard.txt").hardlink_to(source / "sub" / "a.txt")
    (source / "z").symlink_to(elsewhere)
    (source / "y").symlink_to(elsewhere / "deep")
    (source / "again").symlink_to("sub")
    (elsewhere / "up").symlink_to(source)
    (elsewhere / "deep" / "itself").symlink_to(".")
    (source / "loop").symlink_to("loop")
    (source / ".hidden").symlink_to(elsewhere)
    # Under the first of its links by name, whatever the order of the folder.
    assert names(source) == ["sub/a.txt", "y/c.txt", "z/b.txt"]
    assert "3 links to folders that are read anyway are left out: " in caplog.text
    assert "1 files are named more than once, or by links, and read once" in caplog.text
    assert "1 links to nothing, FIFOs, sockets and devices are left out: '" in caplog.text


def test_a_folder_that_is_named_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to("folder")
    assert names(tmp_path / "link") == ["a.txt"]
    assert names(tmp_path / "link", tmp_path / "folder") == ["a.txt"]


def test_a_folder_that_cannot_be_listed_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    listdir = os.listdir

    def refuse(folder: Path) -> list[str]:
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        names(tmp_path)


def test_tables_that_are_read_as_prose_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.txt", "b.csv.txt"):
        (tmp_path / name).write_text("a,b\n")
    assert len(names(tmp_path)) == 2
    assert not caplog.messages
    (tmp_path / "c.csv").write_text("text,id\na,1\n")
    (tmp_path / "d.TSV.gz").write_bytes(gzip.compress(b"text\tid\n"))
    (tmp_path / "e.csv").write_text('{"text": "a"}\n{"text": "b"}\n')  # JSON lines by their bytes
    assert len(names(tmp_path)) == 5
    (warning,) = caplog.messages
    assert warning.startswith("2 files of rows are read as plain text, each as one text with its ")
    assert re.search(r": '[^,]*/c.csv', '[^,]*/d.TSV.gz'; Parquet or JSON lines have", warning)


def test_files_that_are_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("a")
    for number in range(7):
        (tmp_path / f"{number}.png").write_bytes(b"\x89PNG\0")
    assert names(tmp_path) == ["a.txt"]
    assert "7 files whose texts cannot be read are left out: '" in caplog.text
    assert "0.png'" in caplog.text
    assert caplog.text.rstrip().endswith("and 2 more")


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_files_for_validation_add_up_to_the_fraction(tmp_path: Path, fraction: float) -> None:
    for number in range(150):
        # A few large files have most of the bytes.
        (tmp_path / f"{number}.txt").write_text("x" * (100_000 // (number + 1)))
    opened = open_sources([str(tmp_path)])
    chosen = files_in_validation(opened, fraction)
    sizes = {name: path.stat().st_size for name, path in opened.files}
    share = sum(sizes[name] for name in chosen) / sum(sizes.values())
    assert abs(share - fraction) < 0.1 * fraction
    assert chosen == files_in_validation(opened, fraction)


def test_a_name_that_is_no_text_is_read(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/a\xff.txt"
    Path(os.fsdecode(path)).write_text("a")
    opened = open_sources([str(tmp_path)])
    assert [name.encode(errors="surrogateescape") for name, _ in opened.files] == [b"a\xff.txt"]
    assert len(opened.fingerprint()) == 64
    assert len(files_in_validation(opened, 0.9)) == 1
