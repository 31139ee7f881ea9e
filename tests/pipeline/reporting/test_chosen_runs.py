"""Reports of chosen runs, drawn again, and of runs whose numbers cannot be."""

from pathlib import Path

import pytest
from logged_runs import ATTENTION, EVIL, Store, rows, scores
from matplotlib.figure import Figure as FigureOfMatplotlib

from longhaul.pipeline.cli import main
from longhaul.pipeline.reporting import drawing, page
from longhaul.pipeline.reporting.drawing import Figure


def test_a_report_of_chosen_runs_takes_the_place_of_another(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.pipeline.reporting.folder._FIGURES", {})
    folder = tmp_path / "report"
    command = ["report", "tests", str(folder), "--uri", store.uri]
    for options, wanted in (
        ((), ["again", "flagship", "longer", EVIL, "cut off"]),
        (("--runs", "*g*,longer"), ["again", "flagship", "longer"]),
        (("--filter", "attributes.run_name LIKE 'fl%'"), ["flagship"]),
    ):
        assert main([*command, *options]) == 0
        assert [row["run"] for row in rows(folder / "runs.csv")] == wanted
        assert [entry.name for entry in tmp_path.iterdir()] == ["report"]
    # Where folders cannot change places in one step, and something fails in between, it stays.
    monkeypatch.setattr("longhaul.pipeline.system.atomic_folder._RENAME_EXCHANGE", 1 << 20)
    assert main([*command, "--runs", "again"]) == 0
    assert [row["run"] for row in rows(folder / "runs.csv")] == ["again"]
    monkeypatch.setattr(page, "_runs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(command)
    assert [row["run"] for row in rows(folder / "runs.csv")] == ["again"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    "hostile",
    [
        "nan",
        *(
            pytest.param(number, marks=pytest.mark.wide)
            for number in ("inf", "-inf", "1e308", "0", "-1", f"{10**25}")
        ),
    ],
)
def test_no_number_of_one_run_ends_the_report(
    hostile: str, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(
        "longhaul.pipeline.reporting.folder.draw", lambda figure, _: drawn.append(figure)
    )
    monkeypatch.setattr(page, "_figure", lambda *_: "")
    store = Store.in_file(tmp_path, empty_store)
    run_id = store.add("hostile", loss=float(hostile))
    store.add("whole", "trainer.seed=1")
    for name in ("curves/train_loss", "train/tokens_per_second", "evaluation/bigram_loss"):
        store.client.log_metric(run_id, name, float(hostile), step=4)
    store.client.log_metric(run_id, "evaluation/bytes_per_token", float(hostile), step=4)
    store.client.log_metric(run_id, "evaluation/lm-eval/x/acc", float(hostile), step=4)
    tables = {
        "positions": (
            "position,loss_nats,mean_up_to_here,standard_error,standard_error_up_to_here\n"
            "1,2,2,0.1,0.1\n"
        ),
        "loss_in_bins": "first,last,loss_nats,standard_error\n1,2,2,0.1\n",
        "context": "context,loss_nats,tokens,standard_error\n64,4.5,256,0.25\n",
        "perplexity": (
            "window,stride,tokens,perplexity,standard_error,document_tokens,bos\n"
            "64,16,99,20,0.1,all,no\n"
        ),
        "passkey": "length,depth,prompts,right,depths,bos\n256,0.0,4,4,grid,no\n",
        "recall": "pairs,queries,right,low,high,chance\n4,20,15,0.5,0.9,0.05\n",
        "attention": ATTENTION,
        "scores": scores(60.0),
    }
    # Each cell of the last row in turn has the number, beside a table that is as it should be.
    for task, text in tables.items():
        *kept, last = text.strip().splitlines()
        cells = last.split(",")
        for at in range(len(cells)):
            changed = ",".join([*cells[:at], hostile, *cells[at + 1 :]])
            label = f"step-000000004-text-{task}.{at}"
            store.evaluate(run_id, label, task, "\n".join([*kept, changed]))
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    assert {row["run"] for row in rows(tmp_path / "new" / "runs.csv")} == {"hostile", "whole"}
    axes = FigureOfMatplotlib().subplots()
    for figure in drawn:
        axes.clear()
        for series in figure.series:
            drawing._plot(axes, series)
        drawing._axes(axes, figure)
    shown = (tmp_path / "new" / "index.html").read_text()
    left_out = shown[shown.index("Left out") :]
    if hostile != "0":
        assert "Run hostile: curves/validation_loss: found" in left_out
        assert "Run hostile: evaluation/step-000000004-text-context.1/context.csv: row" in left_out
