"""Copies of remote files: one fetch for all, and what is removed for others."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longhaul.datamodules.files.locks import hold
from longhaul.datamodules.remote import cache as module
from longhaul.datamodules.remote.cache import Cache, RemoteFile
from longhaul.datamodules.remote.reading import ContentError

SIZE = 1000


@pytest.fixture
def files(server, tmp_path) -> list[RemoteFile]:
    """Five files of a thousand bytes on the server."""
    found = []
    for number in range(5):
        content = bytes([number]) * SIZE
        (tmp_path / f"file{number}").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        found.append(RemoteFile(f"{server.url}/file{number}", SIZE, digest))
    return found


def use(cache: Cache, file: RemoteFile) -> None:
    with cache.copy_of(file) as path:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def kept(folder: Path) -> list[str]:
    """The last letters of the copies in a cache, each of which has a record."""
    copies = [path for path in folder.iterdir() if path.suffix == ""]
    assert all(path.with_name(f"{path.name}.json").is_file() for path in copies)
    return sorted(path.name[-1] for path in copies)


def test_the_copy_that_was_not_used_for_longest_goes_first(files, server, tmp_path) -> None:
    cache = Cache(tmp_path / "cache", 3 * SIZE)
    for number in (0, 1, 2, 0, 3):
        use(cache, files[number])
    assert kept(tmp_path / "cache") == ["0", "2", "3"]
    use(Cache(tmp_path / "cache", 2 * SIZE), files[4])  # of a run with less room
    assert kept(tmp_path / "cache") == ["3", "4"]
    assert len(server.asked) == 5


def test_a_copy_in_use_stays_and_too_little_room_is_one_line(files, hurried, tmp_path) -> None:
    cache = Cache(tmp_path / "cache", 2 * SIZE)
    with cache.copy_of(files[0]) as first, cache.copy_of(files[1]):
        with pytest.raises(OSError, match=r"^data.cache_bytes: found 2,000, wanted 3,000 or more"):
            use(cache, files[2])
        assert kept(tmp_path / "cache") == ["0", "1"]
        assert first.is_file()
    use(cache, files[2])
    assert kept(tmp_path / "cache") == ["1", "2"]


def test_what_is_being_fetched_takes_room_too(files, server, hurried, tmp_path) -> None:
    cache = Cache(tmp_path / "cache", 2 * SIZE)
    hurried.setattr(module, "blocks", lambda url: use_others(url))
    real = iter([b"\0" * SIZE])
    found = list[str]()

    def use_others(url: str):
        if url == files[0].url:
            with pytest.raises(OSError, match="wanted 3,000 or more"):
                Cache(tmp_path / "cache", 2 * SIZE)._make_room(2 * SIZE)
            found.append(url)
        return real

    use(cache, files[0])
    assert found == [files[0].url]


def test_no_file_goes_that_the_cache_has_not_fetched(files, server, tmp_path) -> None:
    cache = Cache(tmp_path / "cache", 1 * SIZE)
    paths = []
    for number in range(3):
        with cache.copy_of(files[number]) as path:
            paths.append(path)
    mine = [paths[0], tmp_path / "cache" / "notes.txt", paths[1]]
    mine[0].write_bytes(bytes([0]) * SIZE)  # put there by hand, without a record
    mine[1].write_text("mine")
    os.link(tmp_path / "file1", mine[2])  # with the record of another file
    (record,) = (tmp_path / "cache").glob("*.json")
    mine[2].with_name(f"{mine[2].name}.json").write_bytes(record.read_bytes())
    asked = len(server.asked)
    for number in (0, 1):
        use(cache, files[number])
    assert len(server.asked) == asked  # they are as good as others
    paths[2].unlink()
    record.unlink()
    with pytest.raises(OSError, match="wanted 2,000 or more"):
        cache._make_room(SIZE)
    assert all(path.is_file() for path in mine)


@pytest.mark.parametrize("lie", ["short", "long", "other"])
def test_what_differs_from_the_manifest_is_tried_again_and_not_kept(
    files, server, hurried, tmp_path, lie
) -> None:
    cache = Cache(tmp_path / "cache", None)
    server.lies = [lie]
    use(cache, files[0])
    server.always = lie
    with pytest.raises(ContentError, match=r"file1: cannot be fetched \(.*\), 2 attempts"):
        use(cache, files[1])
    assert kept(tmp_path / "cache") == ["0"]
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_copy_is_hashed_once_a_node_and_again_when_it_has_changed(
    files, server, tmp_path, monkeypatch
) -> None:
    hashed = list[str]()
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(file.name) or digest(file, name)
    )
    for _ in range(2):
        with Cache(tmp_path / "cache", None).copy_of(files[0]) as path:
            assert hashed == []  # it was while it was fetched, and others read that
    path.write_bytes(b"x" * SIZE)
    use(Cache(tmp_path / "cache", None), files[0])
    assert len(hashed) == 1
    assert len(server.asked) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"inode": -1}', "FIFO"])
def test_a_damaged_record_is_none(files, server, tmp_path, damage) -> None:
    folder = tmp_path / "cache"
    use(Cache(folder, None), files[0])
    (record,) = folder.glob("*.json")
    record.unlink()
    os.mkfifo(record) if damage == "FIFO" else record.write_text(damage)
    use(Cache(folder, None), files[0])
    assert len(server.asked) == 1  # the copy has been hashed
    with pytest.raises(OSError, match="wanted 2,000 or more"):
        Cache(folder, SIZE)._make_room(SIZE)


def test_all_wait_for_one_fetch_and_none_for_another_file(files, server, tmp_path) -> None:
    threads = [
        threading.Thread(target=use, args=(Cache(tmp_path / "cache", None), files[0]))
        for _ in range(4)
    ]
    server.lies = ["stall"]
    server.freed.clear()
    threads[0].start()
    while not server.asked:
        time.sleep(0.001)
    server.lies, server.always = [], ""
    use(Cache(tmp_path / "cache", None), files[1])  # though the first one stalls
    Cache(tmp_path / "cache", None).fetch_ahead(files[0])  # which does not wait either
    for thread in threads[1:]:
        thread.start()
    server.freed.set()  # it is cut then, and tried again
    for thread in threads:
        thread.join()
    assert server.asked == ["/file0", "/file1", "/file0"]


FETCH = """
import sys
from pathlib import Path
from longhaul.datamodules.remote.cache import Cache, RemoteFile
url, size, sha256, folder = sys.argv[1:]
print("begun", flush=True)
with Cache(Path(folder), 1000).copy_of(RemoteFile(url, int(size), sha256)) as path:
    print(path.stat().st_size, flush=True)
"""


def test_what_a_killed_process_has_left_is_removed_and_what_lives_is_not(files, tmp_path) -> None:
    folder = tmp_path / "cache"
    use(Cache(folder, None), files[0])
    (copy,) = (path for path in folder.iterdir() if path.suffix == "")
    left = [folder / f".{copy.name}{end}.0123abcd.tmp" for end in ("", ".json")]
    alive = folder / f".{copy.name}.4567abcd.tmp"
    for path in (*left, alive, folder / ".mine.89abcdef.tmp"):
        path.write_bytes(b"x")
    with alive.open("rb+") as file:
        assert hold(file.fileno(), alone=True)
        use(Cache(folder, None), files[1])
    assert sorted(path.name for path in folder.glob(".*")) == [alive.name, ".mine.89abcdef.tmp"]


def test_a_fetch_that_fails_while_others_make_room_is_no_error_of_theirs(
    files, tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "cache"
    use(Cache(folder, None), files[0])
    (copy,) = (path for path in folder.iterdir() if path.suffix == "")
    failing = folder / f".{copy.name}.0123abcd.tmp"
    failing.touch()
    scandir = os.scandir

    def then_it_fails(path: Path):
        found = list(scandir(path))
        failing.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "scandir", then_it_fails)
    use(Cache(folder, None), files[1])
    assert kept(folder) == ["0", "1"]


@pytest.mark.wide
def test_a_killed_process_leaves_no_copy_and_its_successor_cleans_up(
    files, server, tmp_path
) -> None:
    folder = tmp_path / "cache"
    server.lies = ["stall"]
    command = [sys.executable, "-c", FETCH, *map(str, files[0]), str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    while not server.asked:
        time.sleep(0.005)
    for process in processes:
        assert process.stdout.readline() == "begun\n"
    (unfinished,) = folder.glob(".*.tmp")
    (holder,) = [one for one in processes if holds(one.pid, unfinished)]
    assert kept(folder) == []
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    (other,) = [one for one in processes if one is not holder]
    assert other.stdout.read() == f"{SIZE}\n"
    assert other.wait() == 0
    for process in processes:
        process.stdout.close()
    assert kept(folder) == ["0"]
    assert not list(folder.glob(".*"))
    assert server.asked == ["/file0"] * 2


def holds(process: int, path: Path) -> bool:
    handles = Path(f"/proc/{process}/fd")
    return any(os.path.realpath(one) == str(path) for one in handles.iterdir())


def read_and_check(files: list[RemoteFile], folder: Path, first: int, errors: list[str]) -> None:
    cache = Cache(folder, 3 * SIZE)
    for turn in range(40):
        file = files[(first + turn * (first + 1)) % len(files)]
        try:
            use(cache, file)
        except OSError as error:  # that there was no room is no wrong byte
            if "cache_bytes" not in str(error):
                errors.append(str(error))
        except AssertionError as error:
            errors.append(repr(error))


def test_readers_find_whole_files_while_others_evict(files, server, hurried, tmp_path) -> None:
    errors = list[str]()
    threads = [
        threading.Thread(target=read_and_check, args=(files, tmp_path / "cache", number, errors))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(kept(tmp_path / "cache")) <= 3
