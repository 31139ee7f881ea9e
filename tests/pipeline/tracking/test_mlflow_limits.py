"""Names as MLflow takes them."""

import pytest

from longhaul.pipeline.tracking.mlflow_limits import clean_name


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("train/loss", "train/loss"),
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
