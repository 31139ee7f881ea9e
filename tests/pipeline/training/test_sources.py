"""A run on several sources, from its first sample to a change of weights."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATE, UPDATES = 512, 12


def sources(corpus: Path, budget: int, *weights: int) -> tuple[str, ...]:
    """Two sources, of which only the first has samples for validation."""
    web, code = weights
    return (
        "data.manifest=null",
        "data.validation_manifest=null",
        "data.workers=0",
        f"data.sources.web.manifest={corpus}/train",
        f"data.sources.web.validation_manifest={corpus}/validation",
        f"data.sources.code.manifest={corpus}/validation",
        f"data.sources.web.weight={web}",
        f"data.sources.code.weight={code}",
        f"trainer.max_tokens={budget * UPDATE}",
    )


def batches(run: Run) -> dict[int, Counter[int]]:
    """Checksums of the micro-batches of every update."""
    found: dict[int, Counter[int]] = {}
    for line in map(json.loads, run.trace.read_text().splitlines()):
        found.setdefault(line["step"], Counter())[line["crc"]] += 1
    return found


@pytest.mark.wide
def test_weights_change_in_a_run_that_was_interrupted(
    corpus: Path, make_run: Callable[[int], Run]
) -> None:
    whole, run = make_run(UPDATES), make_run(UPDATES)
    schedule = f"data.schedule=[{{at_tokens: {8 * UPDATE}, weights: {{web: 1, code: 3}}}}]"
    whole.longhaul("train", "small.yaml", *sources(corpus, UPDATES, 3, 1), schedule)
    (run.path / "small").mkdir()
    process = run.start("train", "small.yaml", *sources(corpus, 8, 3, 1))
    run.wait_for_step(process, 3)
    process.send_signal(15)
    process.communicate()
    run.longhaul("train", "small.yaml", *sources(corpus, 8, 3, 1))
    refused = run.longhaul("train", "small.yaml", *sources(corpus, UPDATES, 1, 3), check=False)
    assert refused.returncode == 2
    assert "data.sources: found" in refused.stderr
    run.longhaul(
        *("train", "small.yaml", *sources(corpus, UPDATES, 1, 3), f"data.from_tokens={8 * UPDATE}")
    )
    # An update that a signal interrupted was begun twice.
    assert {step: set(of) for step, of in batches(run).items()} == {
        step: set(of) for step, of in batches(whole).items()
    }
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    metrics = client.get_run(run_id).data.metrics
    assert {name for name in metrics if name.startswith("validation/loss/")} == {
        "validation/loss/web"
    }
    tokens = {name: int(metrics[f"train/tokens/{name}"]) for name in ("web", "code")}
    assert tokens == {"web": 7 * UPDATE, "code": 5 * UPDATE}
