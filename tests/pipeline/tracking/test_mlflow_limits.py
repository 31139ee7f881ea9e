"""Names as MLflow takes them."""

import pytest

from longhaul.pipeline.tracking.mlflow_limits import clean_name, short_error


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
