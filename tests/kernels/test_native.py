"""C++ that is compiled where it runs: once, kept whole, and never needed."""

import logging
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from longhaul.kernels import native
from longhaul.kernels.native import load

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
