"""Folders from which compiled code is loaded."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from longhaul.kernels import native
from longhaul.pipeline.system import compile_caches


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The folders, each of this user alone, below a home that is too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    folders = {compile_caches.TRITON: tmp_path / "a", compile_caches.TORCH: tmp_path / "b"}
    for variable, folder in folders.items():
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    return folders


@pytest.mark.parametrize("user", ["ada", "group\\ada: b", None])
def test_the_default_is_torchs(user: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compile_caches.TORCH, raising=False)
    if user is None:
        monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError))
    else:
        monkeypatch.setenv("LOGNAME", user)
    assert str(compile_caches.compile_caches()[compile_caches.TORCH]) == default_cache_dir()


@pytest.mark.parametrize("variable", [compile_caches.TRITON, compile_caches.TORCH])
@pytest.mark.parametrize("spoiled", ["mode", "owner"])
@pytest.mark.parametrize("has_own", [True, False])
def test_a_cache_that_others_can_write_is_replaced_by_a_private_one(
    caches: dict[str, Path],
    variable: str,
    spoiled: str,
    has_own: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compile_caches.use_private_caches()
    assert compile_caches.compile_caches() == caches
    assert not caplog.records
    if spoiled == "mode":
        caches[variable].chmod(0o777)
    elif os.getuid() == 0:
        os.chown(caches[variable], 12345, -1)
    else:
        pytest.skip("only root can give a folder away")
    if not has_own:
        monkeypatch.setattr(compile_caches, "cache_folder", lambda: None)
    compile_caches.use_private_caches()
    found = compile_caches.compile_caches()
    (other,) = caches.keys() - {variable}
    assert found[other] == caches[other]
    assert found[variable] != caches[variable]
    assert native.who_else_can_change(found[variable]) is None
    (line,) = caplog.messages
    assert f"others could put code into {caches[variable]}: " in line
    assert str(found[variable]) in line
    compile_caches.use_private_caches()  # and it stays
    assert compile_caches.compile_caches() == found


def test_a_cache_that_is_not_there_is_left_to_those_who_compile(
    caches: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for folder in caches.values():
        folder.rmdir()
    compile_caches.use_private_caches()
    assert compile_caches.compile_caches() == caches
    assert not caplog.records
