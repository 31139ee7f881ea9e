"""A folder that is complete or absent, beside what someone else has put there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longhaul.pipeline.system.atomic_folder import atomic_folder

Plant = Callable[[Path, Path], None]


@pytest.mark.parametrize(
    ("name", "plant", "found"),
    [
        (".new.unfinished", lambda path, home: path.symlink_to(home), "a link to "),
        (".new.unfinished", lambda path, home: path.symlink_to(home / "new"), "a link to "),
        (".new.unfinished", lambda path, home: os.mkfifo(path), "a file"),
        (".new.unfinished/.lock", lambda path, home: path.symlink_to(home / "a"), "a link"),
        (".new.unfinished/.lock", lambda path, home: path.symlink_to(home / "new"), "a link"),
        (".new.unfinished/.lock", lambda path, home: os.mkfifo(path), "a FIFO"),
    ],
)
def test_what_is_planted_beside_it_costs_no_file_of_the_user(
    tmp_path: Path, name: str, plant: Plant, found: str
) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    (home / "folder").mkdir(parents=True)
    (home / "a").write_text("precious")
    (run / name).parent.mkdir(parents=True)
    plant(run / name, home)
    with pytest.raises(OSError, match=f"{name}: found {found}"), atomic_folder(run / "new"):
        pass
    assert sorted(path.name for path in home.iterdir()) == ["a", "folder"]
    assert (home / "a").read_text() == "precious"
    assert not (run / "new").exists()


def test_links_in_what_a_killed_process_left_are_removed_themselves(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a").touch()
    left = tmp_path / ".new.unfinished"
    left.mkdir()
    for name, target in (("folder", "home"), ("file", "home/a"), ("nothing", "nowhere")):
        (left / name).symlink_to(tmp_path / target)
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "b").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["a"]
