"""A store with runs of all sorts, and the report of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from logged_runs import ATTENTION, BINS, EVIL, POSITIONS, Store, scores

from longhaul.pipeline.cli import main
from longhaul.pipeline.tracking.mlflow_run import create_parent


@pytest.fixture(scope="module")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two variants at two contexts, one with two seeds, an unfinished run, a sweep's parent."""
    folder = tmp_path_factory.mktemp("store")
    store = Store.in_file(folder, empty_store)
    create_parent(folder / "sweep", store.uri, "tests", "parent")
    softmax = store.add(EVIL, "model.attention.kind=softmax", loss=4.0)
    flagship = store.add("flagship", loss=3.5)
    store.add("again", "trainer.seed=1", loss=3.75)
    store.add("longer", "data.context=128", loss=3.25)
    store.add("cut off", "data.context=128", "model.attention.kind=softmax", status="RUNNING")
    older = POSITIONS.replace("256,", "512,")
    store.evaluate(softmax, "step-000000002-context-256", "positions", older)
    store.evaluate(softmax, "step-000000004", "positions", POSITIONS[: POSITIONS.index("65,")])
    store.evaluate(softmax, "step-000000004-context-256", "positions", POSITIONS)
    store.evaluate(softmax, "step-000000004-context-256-text-a-b.c", "positions", POSITIONS)
    store.evaluate(softmax, "step-000000004-context-256", "loss_in_bins", BINS)
    store.evaluate(softmax, "step-000000004", "scores", scores(60.0))
    store.evaluate(softmax, "step-000000004-dynamic_ntk-4", "scores", scores(4.0))
    for label, perplexities, options in (
        ("step-000000004", (20.0, 900.5), "all,yes"),
        ("step-000000004-dynamic_ntk-4", (21.0, 25.25), "512,no"),
    ):
        lines = [
            "window,stride,documents,tokens,loss_nats,perplexity,standard_error,document_tokens,bos"
        ]
        for window, value in zip((64, 256), perplexities, strict=True):
            lines.append(f"{window},16,2,1024,1,{value},nan,{options}")
        store.evaluate(softmax, label, "perplexity", "\n".join(lines))
    passkeys = "length,depth,prompts,right,accuracy,depths,bos\n256,0.0,4,4,1.0,grid,yes\n"
    passkeys += "256,0.5,4,2,0.5,grid,yes\n512,0.0,4,0,0.0,grid,yes\n"
    store.evaluate(softmax, "step-000000004", "passkey", passkeys)
    windows = "context,loss_nats,tokens,standard_error\n64,4.5,256,0.25\n128,4.25,256,0.5\n"
    store.evaluate(flagship, "step-000000004", "context", windows)
    recalled = "pairs,queries,right,low,high,chance\n4,20,15,0.5,0.875,0.05\n8,40,4,0,0.25,0.05\n"
    store.evaluate(softmax, "step-000000004", "recall", recalled)
    store.evaluate(flagship, "step-000000004", "recall", recalled)
    store.evaluate(flagship, "step-000000004", "attention", ATTENTION)
    for step, name, value in (
        (2, "evaluation/bigram_loss", 5.0),
        (4, "evaluation/bigram_loss", 3.5),
        (4, "evaluation/lm-eval/longhaul_pairs/acc", 0.625),
        (4, "evaluation/lm-eval/longhaul_pairs/acc_stderr", 0.0625),
        (4, "evaluation/lm-eval/gsm8k/exact_match/strict-match", 0.0),
    ):
        store.client.log_metric(softmax, name, value, step=step)
    return store


@pytest.fixture(scope="module")
def reported(store: Store, once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def fill(folder: Path) -> None:
        left_by_a_killed_one = folder / ".report.unfinished"
        left_by_a_killed_one.mkdir()
        (left_by_a_killed_one / "old.png").touch()
        assert main(["report", "tests", str(folder / "report"), "--uri", store.uri]) == 0

    return once("reported", fill) / "report"
