"""What files may say of commands, hosts and databases."""

import inspect
import sys
from pathlib import Path

import pytest

from longhaul.datamodules.files.untrusted import check_no_links
from longhaul.datamodules.named import is_named, is_named_store, names, remember


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what was named, in an empty folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "state" / "longhaul" / "named"


def test_a_path_needs_no_name_and_a_command_and_a_host_do() -> None:
    assert is_named("data/train")
    assert is_named("file:///data/train")
    for location in ("pipe:cat a", "http://h/a", "s3://bucket/a", "sqlite:////tmp/x.db"):
        assert not is_named(location), location
        remember([location])
        assert is_named(location), location


@pytest.mark.parametrize(
    "other",
    [
        "https://lab:5000",
        "http://lab",
        "http://lab:5001",
        "http://lab.evil:5000",
        "http://evil/?http://lab:5000",
        "http://evil#@lab:5000",
        "http://evil\\@lab:5000/",
        "http://lab:5000@evil",
        "http://lab:5000/a'; touch pwned; '",
        "http://lab:5000/a\nb",
        "pipe:http://lab:5000",
        "pipe://lab:5000",
    ],
)
def test_a_host_is_named_and_no_other_and_no_command(other: str) -> None:
    remember(["http://me:secret@LAB:5000/api"])
    assert is_named("http://lab:5000")
    assert is_named("http://you@lab:5000/elsewhere?x=1")
    assert not is_named(other)


def test_a_command_is_named_word_for_word_and_no_secret_of_a_url_is_kept(state: Path) -> None:
    remember(["pipe:cat a", "http://me:secret@lab:5000/api"])
    assert is_named("pipe:cat a")
    assert not is_named("pipe:cat a; touch b")
    assert "secret" not in state.read_text()
    assert state.stat().st_mode & 0o077 == 0


def test_the_environment_names_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.lab")
    assert is_named("https://mlflow.lab")
    assert not is_named("https://mlflow.lab:8443")


def test_a_database_above_the_run_is_where_a_moved_run_logs(tmp_path: Path) -> None:
    run = tmp_path / "proj" / "runs" / "a"
    run.mkdir(parents=True)
    assert is_named_store(f"sqlite:///{tmp_path}/proj/mlflow.db", run)
    (tmp_path / "proj" / "link.db").symlink_to(tmp_path / "other.db")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    for path in ("elsewhere/mlflow.db", "proj/.profile", "proj/link.db", "proj/runs/a/mlflow.db"):
        assert not is_named_store(f"sqlite:///{tmp_path}/{path}", run), path
    assert not is_named_store("http://lab:5000", run)


@pytest.mark.parametrize("damage", ["mode", "link", "text", "folder", "bytes"])
def test_a_list_that_others_may_have_written_names_nothing(state: Path, damage: str) -> None:
    remember(["pipe:cat a"])
    assert is_named("pipe:cat a")
    if damage == "mode":
        state.chmod(0o622)
    elif damage == "link":
        state.rename(state.with_name("real"))
        state.symlink_to(state.with_name("real"))
    elif damage == "text":
        state.write_text("pipe:cat a\n")
    elif damage == "folder":
        state.unlink()
        state.mkdir()
    else:
        state.write_bytes(b"\xff\n")
    assert not is_named("pipe:cat a")


def test_a_torn_line_hides_no_other(state: Path) -> None:
    remember(["pipe:cat a"])
    with state.open("a") as file:
        file.write('{"a": 1}\n"pipe:cat')
    remember(["pipe:cat b", ("slurm.extra", "--reservation=a")])
    assert is_named("pipe:cat a")
    assert is_named("pipe:cat b")
    assert is_named(("slurm.extra", "--reservation=a"))
    assert not is_named(("slurm.account", "--reservation=a"))


def test_a_link_is_found_however_deep_it_lies(tmp_path: Path) -> None:
    inner = tmp_path
    for _ in range(100):
        inner /= "a"
    inner.mkdir(parents=True)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack(0)) + 60)
        check_no_links(tmp_path, "a")
        (inner / "b").symlink_to("/tmp")
        check_no_links(tmp_path, "logs")
        with pytest.raises(ValueError, match="/b: found a link to '/tmp'"):
            check_no_links(tmp_path, "a")
    finally:
        sys.setrecursionlimit(limit)


def test_a_job_has_what_was_named_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = names(["data/train", "pipe:cat a", "http://me:secret@lab:1/x"])
    assert lines == ['"http://lab:1"', '"pipe:cat a"']
    monkeypatch.setenv("LONGHAUL_NAMED", "\n".join(lines))
    assert is_named("http://lab:1")
    assert not is_named("http://lab:2")


def test_where_nothing_can_be_kept_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember(["pipe:cat a"])
    assert not is_named("pipe:cat a")
    assert "what you have named is not remembered" in caplog.text
