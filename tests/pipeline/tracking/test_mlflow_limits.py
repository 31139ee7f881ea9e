"""Names as MLflow takes them."""

import os
from pathlib import Path

import pytest
from tracked_runs import mlflow_run, started_tracker

from longhaul.datamodules.files.untrusted import copy_regular
from longhaul.pipeline.tracking.mlflow_limits import clean_name, is_lasting, short_error
from longhaul.pipeline.tracking.mlflow_mirror import MlflowMirror


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("curves/train_loss", "curves/train_loss"),
        ("loss@2%", "loss_2_"),
        ("/a//b/../c/", "a/b/c"),
        ("..", "_"),
        ("é:x y.z-", "é:x y.z-"),
        ("x" * 300, "x" * 250),
        ("x" * 249 + "/y", "x" * 249),
    ],
)
def test_names_become_what_mlflow_takes(name: str, wanted: str) -> None:
    from mlflow.utils.validation import _validate_metric_name  # Slow to import.

    assert clean_name(name) == wanted
    _validate_metric_name(clean_name(name))


def test_a_package_that_is_missing_is_not_waited_for() -> None:
    assert is_lasting(ModuleNotFoundError("No module named 'mlflow'"))
    assert not is_lasting(ConnectionError("refused"))


def test_the_reason_of_a_failed_request_is_not_cut_off() -> None:
    address = f"http://{'long-name.' * 20}example:5000"
    for layers, reason in (
        ("NewConnectionError('<HTTPConnection(host=\"a\") at 0x7f>: {}')", "Connection refused"),
        ("NewConnectionError(\"HTTPConnection(host='a', port=1): {}\")", "[Errno 111] refused"),
        ("ConnectTimeoutError(<HTTPConnection object at 0x7f>, '{}')", "timed out. (timeout=30)"),
        ("NameResolutionError(\"HTTPConnection(host='a', port=5000): {}\")", "Failed to resolve"),
    ):
        text = f"API request to {address} failed with HTTPConnectionPool(host='a', port=1): Max "
        text += f"retries exceeded with url: /api (Caused by {layers.format(reason)})"
        assert short_error(OSError(text)) == f"OSError: {reason}"


@pytest.mark.parametrize("form", ["FIFO", "link"])
def test_nothing_that_takes_a_file_s_place_before_it_is_sent_is_opened(
    store: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    path = run_dir / "own.txt"
    path.write_text("own")

    def swap(*_: object) -> bool:
        """Stands for `_may_store`, between the look at a file and its upload."""
        if path.is_file() and not path.is_symlink():
            path.unlink()
            os.mkfifo(path) if form == "FIFO" else path.symlink_to(tmp_path / "secret.txt")
        return True

    monkeypatch.setattr(MlflowMirror, "_may_store", swap)
    tracker = started_tracker(run_dir, store)
    tracker.log_artifact(path)
    assert tracker.finish("FINISHED", timeout_s=20)
    artifacts = Path(mlflow_run(store, run_dir).info.artifact_uri)
    assert not (artifacts / "own.txt").exists()


def test_a_copy_is_bounded_while_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    copy_regular(tmp_path / "a", tmp_path / "b", 5)
    assert (tmp_path / "b").read_bytes() == b"12345"
    with pytest.raises(ValueError, match="a: found more bytes, wanted 4 at most"):
        copy_regular(tmp_path / "a", tmp_path / "b", 4)
