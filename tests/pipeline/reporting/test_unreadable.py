"""What a report leaves out since it cannot be read, and what it writes of evil text."""

import os
from pathlib import Path

import pytest
from logged_runs import ATTENTION, POSITIONS, Page, Store, rows, small_config

from longhaul.configs import to_yaml
from longhaul.pipeline.cli import main
from longhaul.pipeline.reporting import page
from longhaul.pipeline.reporting.drawing import write_csv


def test_a_run_that_cannot_be_read_is_named(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.pipeline.reporting.folder._FIGURES", {})
    store = Store.in_file(tmp_path, empty_store)
    store.add("whole")
    store.client.log_text(store.add("<b>old"), "model: {laiers: 2}", "config.yaml")
    client, experiment = store.client, store.experiment
    old = store.add("older")
    store.evaluate(old, "step-000000004", "context", "windows,loss\n64,1\n")
    own = to_yaml(small_config())
    for name, old_text, new in (
        ("large", "layers: 2", "layers: 1000000000"),
        ("curious", "name: demo", "name: ${oc.env:HOME}"),
    ):
        store.client.log_text(store.add(name), own.replace(old_text, new), "config.yaml")
    bare = client.create_run(experiment, run_name="bare", tags={"longhaul.attention": "softmax"})
    client.set_terminated(bare.info.run_id)
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    shown = "".join(Page((tmp_path / "new" / "index.html").read_text()).texts)
    assert "Run <b>old: config.yaml cannot be read here: model.attention.kind" in shown
    table = "evaluation/step-000000004/context.csv"
    assert f"Run older: {table}: row 1: context: found nothing, wanted a value" in shown
    assert "Run bare: config.yaml is not in MLflow" in shown
    assert "Run large: config.yaml cannot be read here: model.layers: found 1000000000," in shown
    assert "Run curious: config.yaml cannot be read here: name: found '${oc.env:HOME}'" in shown
    assert os.environ["HOME"] not in shown
    # A table that cannot be read leaves out its figure alone.
    assert [row["run"] for row in rows(tmp_path / "new" / "runs.csv")] == ["older", "whole"]


def test_tables_that_cannot_be_read_are_one_line_each(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.pipeline.reporting.folder.draw", lambda *_: None)
    monkeypatch.setattr(page, "_figure", lambda *_: "")
    store = Store.in_file(tmp_path, empty_store)
    run_id = store.add("damaged\x1b[2J")
    label = "step-000000004"
    for task, text in (
        ("positions", POSITIONS.replace("1,4.995,", "1,4.995,4.9,", 1)),
        ("passkey", "length,depth,prompts,right,accuracy\n"),
        ("context", "context,loss_nats\n64,4.5\n"),
        ("recall", "pairs,queries,right,low,high,chance\n4,4,5,0,1,0.1\n"),
        ("attention", ATTENTION.replace("0,1,", "0,one,")),
        (
            "perplexity",
            (
                "window,stride,tokens,perplexity,standard_error,document_tokens,bos\n"
                "64,64,99,20.0,nan,all,no\n"
            ),
        ),
    ):
        store.evaluate(run_id, label, task, text)
    artifacts = Path(store.client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    folder = artifacts / "evaluation" / label
    (folder / "scores.csv").symlink_to("nowhere")
    (folder / "loss_in_bins.csv").write_bytes(b"first\xff")
    (folder.parent / "step-000000005").symlink_to("step-000000005")
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    text = (tmp_path / "new" / "index.html").read_text()
    assert "\x1b" not in text
    left_out = text[text.index("Left out") : text.index("Configs")]
    above, *others = text.split('<p class="caveat">Not measured: whether these models are better ')
    assert len(others) == 1
    assert "<h2>Figures</h2>" not in above
    for task, reason in (
        ("positions", "row 1: found [&#x27;8&#x27;] after the last column"),
        ("passkey", "found no rows"),
        ("context", "row 1: tokens: found nothing"),
        ("recall", "row 1: right: found 5, wanted at most queries = 4"),
        ("attention", "row 2: matrix: found &#x27;one&#x27;"),
        ("scores", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("loss_in_bins", "UnicodeDecodeError: &#x27;utf-8&#x27; codec can&#x27;t decode byte 0xff"),
    ):
        assert f"<li>Run damaged\\x1b[2J: evaluation/{label}/{task}.csv: {reason}" in left_out
    assert "evaluation/step-000000005: OSError: [Errno 40] Too many levels" in left_out
    assert "Values recalled: longhaul evaluate RUN --tasks recall" in left_out
    pair = "no finished run of another kind has a run of the reference kind (--against)"
    assert f"Gap at equal sequences: {pair} of its seed, context and data" in left_out
    assert "--tasks positions --context N, with N tokens in a window" in left_out
    assert "Perplexity of a sliding window" not in left_out
    assert len(rows(tmp_path / "new" / "runs.csv")) == 1


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-x", "'-x"),
        ("@sum", "'@sum"),
        (" =1", "' =1"),
        ("\t=1", "\\t=1"),
        ("\r=1", "\\r=1"),
        ("\uff1d1", "'\uff1d1"),
        ("a\x1b[2Jb\x00\n\u202ec", "a\\x1b[2Jb\\x00\\n\\u202ec"),
        ("half \ud800", "half \\ud800"),
        ("-1.5", "-1.5"),
        ("a=b-c", "a=b-c"),
        ("", ""),
        (-1.5, "-1.5"),
    ],
)
def test_no_cell_is_a_formula_or_controls_a_terminal(
    cell: str | float, written: str, tmp_path: Path
) -> None:
    write_csv(tmp_path / "x.csv", ["a", "b"], [[cell, "x"]])
    assert rows(tmp_path / "x.csv") == [{"a": written, "b": "x"}]


def test_no_artifact_is_copied_before_it_is_known_to_be_a_file(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.pipeline.reporting.folder._FIGURES", {})
    store = Store.in_file(tmp_path, empty_store)
    store.add("whole")
    for name in ("device", "huge"):
        run = store.client.get_run(store.add(name))
        file = Path(run.info.artifact_uri, "config.yaml")
        file.unlink()
        if name == "device":
            file.symlink_to("/dev/zero")
        else:
            with file.open("wb") as opened:
                opened.truncate(1 << 27)
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    shown = "".join(Page((tmp_path / "new" / "index.html").read_text()).texts)
    assert "config.yaml: found a device, wanted a regular file" in shown
    assert "config.yaml: found more than 67,108,864 bytes" in shown
