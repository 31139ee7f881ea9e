"""C++ that is compiled where it runs: once, kept whole, and never needed."""

import hashlib
import logging
import os
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from longhaul.kernels import native
from longhaul.kernels.native import load

# A group that is not this user's own.
SHARED_GROUP = next((group for group in os.getgroups() if group != os.getgid()), 65534)
ADD = 'extern "C" int add(int a, int b) { return a + b; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/longhaul"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "add.cpp"
    path.write_text(ADD)
    return path


def test_what_was_compiled_is_kept_by_its_content(cache: Path, source: Path) -> None:
    assert load(source).add(2, 3) == 5
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = kept.stat()
    assert load(source).add(2, 3) == 5
    after = kept.stat()  # whose time of access may differ
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    source.write_text(ADD.replace("+", "-"))
    assert load(source).add(2, 3) == -1
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler"),
        ("/bin/false", "/bin/false ended with status 1"),
        ("c++ -no-such-flag", "-no-such-flag"),
        ('c++ "', "quotation"),
    ],
)
def test_without_a_compiler_one_line_says_so(
    cache: Path,
    source: Path,
    compiler: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    native._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load(source) is None
        assert load(source) is None
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "wanted GCC" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not cache.exists() or not list(cache.iterdir())


def test_a_broken_file_leaves_nothing_behind(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("not C++")
    assert load(source) is None
    assert "error" in caplog.text
    assert not list(cache.iterdir())


@pytest.mark.parametrize("size", [0, 4096, -40, -1])
def test_a_damaged_file_is_compiled_again(cache: Path, source: Path, size: int) -> None:
    load(source)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(whole[:size])
    assert load(source).add(2, 3) == 5
    assert kept.read_bytes() == whole


def test_what_cannot_be_loaded_is_not_kept(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("extern int missing; int* address = &missing;")
    assert load(source) is None
    assert "missing" in caplog.text
    assert not list(cache.iterdir())


def test_a_full_disk_is_not_needed(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = native._run

    def run_on_full_disk(command: list[str]) -> bytes:
        if any(str(cache) in part for part in command):
            raise subprocess.CalledProcessError(1, command, stderr=b"ld: No space left on device")
        return run(command)

    monkeypatch.setattr(native, "_run", run_on_full_disk)
    assert load(source).add(2, 3) == 5
    assert not list(cache.iterdir())


def test_a_cache_that_others_can_write_is_not_used(cache: Path, source: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert load(source).add(2, 3) == 5
    assert not list(cache.iterdir())


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_cache_in_a_folder_that_others_can_write_is_not_used(
    cache: Path,
    source: Path,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.mkdir(mode=0o700, parents=True)
    cache.parent.chmod(mode)
    os.chown(cache.parent, -1, SHARED_GROUP)
    native._warn_of_cache.cache_clear()
    assert load(source).add(2, 3) == 5
    assert load(source).add(2, 3) == 5
    assert not list(cache.iterdir())
    (record,) = caplog.records
    assert record.getMessage().endswith(
        f"{cache.parent} is user {os.getuid()}'s with mode {mode:o}; XDG_CACHE_HOME names another "
        "cache folder"
    )


def test_a_cache_below_a_folder_such_as_tmp_is_used(cache: Path, source: Path) -> None:
    cache.mkdir(mode=0o700, parents=True)
    cache.parent.chmod(0o1777)
    assert load(source).add(2, 3) == 5
    assert len(list(cache.iterdir())) == 1


AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")


@AS_ROOT
@pytest.mark.parametrize("part", ["folder", "above", "file"])
def test_what_is_anothers_is_not_loaded(cache: Path, source: Path, part: str) -> None:
    load(source)
    (kept,) = cache.iterdir()
    spoiled = replace_code(kept)
    os.chown({"folder": cache, "above": cache.parent, "file": kept}[part], 65534, -1)
    assert load(source).add(2, 3) == 5
    assert (kept.read_bytes() == spoiled) == (part != "file"), "in one's own folder it is replaced"


@AS_ROOT
@pytest.mark.parametrize(("in_container", "is_used"), [(True, True), (False, False)])
def test_a_cache_below_what_a_container_shows_as_nobodys_is_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_container: bool, is_used: bool
) -> None:
    users = tmp_path / "uid_map"
    users.write_text(f"0 1000 {1 if in_container else 2**32 - 1}\n")
    monkeypatch.setattr(native, "_USER_MAP", users)
    cache.mkdir(mode=0o700, parents=True)
    os.chown(cache.parent, int(native._OVERFLOW_USER.read_text()), -1)
    changer = native.who_else_can_change(cache)
    assert (changer is None) == is_used, changer
    os.chown(cache.parent, 12345, -1)
    assert f"{cache.parent} is user 12345's" in str(native.who_else_can_change(cache))


@AS_ROOT
def test_a_cache_in_a_home_below_anothers_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "group" / "me"
    cache = home / ".cache" / "longhaul"
    cache.mkdir(mode=0o700, parents=True)
    monkeypatch.setenv("HOME", str(home))
    os.chown(home.parent, 12345, -1)
    assert native.who_else_can_change(cache) is None
    home.parent.chmod(0o777)
    assert "with mode 777" in str(native.who_else_can_change(cache))
    home.parent.chmod(0o755)
    os.chown(home, 12345, -1)
    assert f"{home} is user 12345's" in str(native.who_else_can_change(cache))


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_file_that_others_can_write_is_replaced(cache: Path, source: Path, mode: int) -> None:
    load(source)
    (kept,) = cache.iterdir()
    spoiled = replace_code(kept)
    kept.chmod(mode)
    assert load(source).add(2, 3) == 5
    assert kept.read_bytes() != spoiled
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def replace_code(kept: Path) -> bytes:
    """Put a library in the place of one, whole by its checksum, whose `add` subtracts."""
    folder = kept.parent.parent
    (folder / "other.cpp").write_text(ADD.replace("+", "-"))
    command = ["c++", "-shared", "-fPIC", str(folder / "other.cpp"), "-o", str(folder / "other")]
    subprocess.run(command, check=True)
    code = (folder / "other").read_bytes()
    kept.unlink()  # what is loaded already must not change
    kept.write_bytes(code + hashlib.sha256(code).digest())
    kept.chmod(0o700)
    return kept.read_bytes()


@pytest.mark.parametrize(
    "what", ["link", "dangling link", "endless device", "FIFO", "folder", "huge"]
)
def test_what_is_no_file_is_not_read(cache: Path, source: Path, tmp_path: Path, what: str) -> None:
    load(source)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()
    if what == "FIFO":
        os.mkfifo(kept)
    elif what == "folder":
        kept.mkdir()
    elif what == "huge":
        with kept.open("wb") as file:
            file.truncate(1 << 40)
    else:
        target = {"link": tmp_path / "elsewhere", "endless device": Path("/dev/zero")}
        kept.symlink_to(target.get(what, tmp_path / "nothing"))
        (tmp_path / "elsewhere").write_bytes(whole)
    assert load(source).add(2, 3) == 5
    if what != "folder":
        assert not kept.is_symlink()
        assert kept.read_bytes() == whole
    if what == "link":
        assert (tmp_path / "elsewhere").read_bytes() == whole


def test_what_is_kept_is_ones_own_whatever_the_umask(cache: Path, source: Path) -> None:
    before = os.umask(0)
    try:
        load(source)
        (kept,) = cache.iterdir()
        inode = kept.stat().st_ino
        load(source)
    finally:
        os.umask(before)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert kept.stat().st_ino == inode, "it is not compiled again"


@pytest.mark.parametrize("hangs_at", ["-dM", "-o"])
def test_a_compiler_that_does_not_answer_is_ended(
    cache: Path,
    source: Path,
    tmp_path: Path,
    hangs_at: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With all that it started, of which one has its output open; and it is not asked again."""
    compiler = tmp_path / "slow"
    starts = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{hangs_at}*) {starts};; esac\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "_QUIET_SECONDS", 0.5)
    monkeypatch.setattr(native, "_MOST_SECONDS", 0.8)
    native._warn.cache_clear()
    assert load(source) is None
    assert load(source) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{compiler} has been compiling C++ for 0.5 s; it gets 0.8, then torch")
    assert f"CXX: {compiler} has not ended after 0.8 s; wanted" in second
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10  # A process that was killed ends when it is scheduled.
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_compiler_has_nothing_to_read(cache: Path, source: Path, tmp_path: Path) -> None:
    """Nothing of what the user types, or pipes into the command, is for it."""
    assert native._run(["cat"]) == b""


def test_a_cache_that_cannot_be_written_is_not_needed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load(source).add(2, 3) == 5


def test_only_plain_tensors_of_a_cpu_are_read() -> None:
    x = torch.randn(3)
    assert native.serves(x, torch.nn.Parameter(x))
    assert not native.serves(x, x.double())
    assert not native.serves(x.to("meta"))
    assert not native.serves(torch._neg_view(x))
    with torch._subclasses.FakeTensorMode():
        assert not native.serves(torch.randn(3))
    served = []
    torch.func.vmap(lambda row: served.append(native.serves(row)) or row)(x)
    assert served == [False]
