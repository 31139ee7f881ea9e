"""`longhaul report`: its numbers against what was logged, its page, and what it refuses."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from logged_runs import EVIL, LOSSES, POSITIONS, Page, Store, rows, small_config
from mlflow.tracking import MlflowClient

from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.cli import main
from longhaul.pipeline.planning.sizes import attention_layers, state_bytes
from longhaul.pipeline.reporting import page
from longhaul.pipeline.reporting.drawing import Figure
from longhaul.pipeline.reporting.runs import read_runs

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def test_every_figure_has_its_three_files_and_nothing_else_is_there(reported: Path) -> None:
    stems = {
        "loss_at_sequences",
        "gap_at_sequences",
        "loss_against_context",
        "gap_against_context",
        "speed_against_context",
        "passkey_000064",
        "perplexity_000064",
        "loss_at_position_000064",
        "loss_up_to_position_000064",
        "loss_up_to_position_000064_a-b.c",
        *(
            f"scores_{layers}{part}{scaling}_000064"
            for layers in ("low", "last")
            for part in ("", "_end")
            for scaling in ("", "_dynamic_ntk-4")
        ),
        "loss_in_windows_000064",
        "recall_000064",
        "gap_recall_000064",
        *(f"loss_against_{x}_{n:06d}" for x in ("tokens", "state") for n in (64, 128)),
    }
    wanted = {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "pdf", "csv")}
    tables = ("ntk_perplexity", "attention", "scores", "bigram", "lm_eval")
    wanted |= {
        "index.html",
        "report.sha256",
        "runs.csv",
        "seeds.csv",
        "verdicts.csv",
        *(f"{name}_000064.csv" for name in tables),
    }
    assert {file.name for file in reported.iterdir()} == wanted
    for file in reported.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")
    for file in reported.glob("*.pdf"):
        assert file.read_bytes().startswith(b"%PDF")
    assert [entry.name for entry in reported.parent.iterdir()] == ["report"]


def test_losses_are_those_that_were_logged(reported: Path) -> None:
    found = rows(reported / "loss_against_tokens_000064.csv")
    assert len(found) == 3 * len(LOSSES)
    own = [row for row in found if row["run"] == EVIL]
    assert [int(row["tokens"]) for row in own] == [512, 1024, 1536, 2048]
    assert [int(row["updates"]) for row in own] == [1, 1, 0, 1]
    assert str([float(row["loss_nats"]) for row in own]) == str(LOSSES)


def test_the_table_of_runs_is_what_was_logged(reported: Path) -> None:
    found = {row["run"]: row for row in rows(reported / "runs.csv")}
    assert set(found) == {EVIL, "flagship", "again", "longer", "cut off"}
    row, model = found["longer"], build_on_meta(small_config("data.context=128").model)
    assert row["variant"] == "conformal_sympow p=2"
    assert (row["status"], row["training_context"], row["tokens"]) == ("FINISHED", "128", "2048")
    assert float(row["validation_loss_nats"]) == 3.25
    assert float(row["tokens_per_second"]) == 250
    assert int(row["parameters"]) == model.num_parameters()
    assert int(row["state_bytes"]) == state_bytes(attention_layers(model), 128)
    assert (row["commit"], row["hardware"]) == ("abc", "a processor")
    assert (row["data"], row["data_sha256"]) == ("gpt2/train", "9" * 64)
    config = small_config()
    assert float(row["learning_rate"]) == config.optim.learning_rate
    assert (row["seed"], found["again"]["seed"]) == (str(config.trainer.seed), "1")
    assert found["cut off"]["status"] == "RUNNING"
    by_context = rows(reported / "loss_against_context.csv")
    assert {row["run"]: float(row["validation_loss_nats"]) for row in by_context} == {
        EVIL: 4.0,
        "flagship": 3.5,
        "again": 3.75,
        "longer": 3.25,
        "cut off": 4.5,
    }


def test_the_newest_checkpoint_at_its_longest_windows_counts(reported: Path) -> None:
    found = rows(reported / "loss_up_to_position_000064.csv")
    assert {row["step"] for row in found} == {"4"}
    assert [int(row["position"]) for row in found] == list(range(1, 257))
    assert float(found[99]["loss_nats"]) == 4.5
    assert float(found[99]["standard_error"]) == 0.1
    assert float(found[99]["mean_up_to_here"]) == 4.75
    assert float(found[99]["standard_error_up_to_here"]) == 0.05
    other = rows(reported / "loss_up_to_position_000064_a-b.c.csv")
    assert {row["text"] for row in other} == {"a-b.c"}


def test_the_loss_at_a_position_is_that_of_its_bin(reported: Path) -> None:
    found = rows(reported / "loss_at_position_000064.csv")
    assert [float(row["position"]) for row in found] == [t + 0.5 for t in range(1, 257, 2)]
    assert [(row["first"], row["last"], row["window"]) for row in found[:2]] == [
        ("1", "2", "256"),
        ("3", "4", "256"),
    ]
    assert [float(row["loss_nats"]) for row in found[:2]] == [5 - 1 / 200, 5 - 3 / 200]
    assert {row["standard_error"] for row in found} == {"0.25"}


def test_losses_at_equal_sequences_are_of_the_same_text_for_all_kinds(reported: Path) -> None:
    # All have read 2,048 tokens: 16 sequences of 128, and as many of 64 after two updates.
    found = {row["run"]: row for row in rows(reported / "loss_at_sequences.csv")}
    assert {row["sequences"] for row in found.values()} == {"16"}
    assert {name: float(row["training_loss_nats"]) for name, row in found.items()} == {
        EVIL: 5.0,
        "flagship": 5.0,
        "again": 5.0,
        "longer": 4.25,
        "cut off": 4.25,
    }
    # `again` has another seed than the softmax run; the softmax run of `longer` is not finished.
    for name, gap in (("gap_at_sequences", 0.0), ("gap_against_context", -0.5)):
        gaps = {row["run"]: float(row["gap_nats"]) for row in rows(reported / f"{name}.csv")}
        assert gaps == {EVIL: 0.0, "flagship": gap}
    seeds = {(row["variant"], row["training context"]): row for row in rows(reported / "seeds.csv")}
    row = seeds["conformal_sympow p=2", "64"]
    assert (row["seeds"], float(row["validation loss"])) == ("2", 3.625)
    assert float(row["error of validation loss"]) == pytest.approx(0.125)
    assert (row["gap in validation loss"], row["error of gap in validation loss"]) == (
        "-0.5",
        "nan",
    )


def test_attention_scores_are_drawn_by_layer_and_compared(reported: Path) -> None:
    (scaled, plain) = rows(reported / "scores_000064.csv")[::-1]
    assert (plain["positions"], scaled["positions"]) == ("as trained", "dynamic_ntk-4")
    assert (plain["tokens"], plain["low layers"], plain["last layer"]) == ("4", "30.0", "60.0")
    assert float(plain["outliers (ratio to the least)"]) == 15.0
    assert float(scaled["outliers (ratio to the least)"]) == 1.0
    for part, factor in (("low", 1), ("last", 10)):
        for end, keys in (("", [1, 2, 3, 4]), ("_end", [3, 4])):
            own = rows(reported / f"scores_{part}{end}_000064.csv")
            assert [int(row["key"]) for row in own] == keys
            assert {row["positions"] for row in own} == {""}
            assert [float(row["score"]) for row in own] == [factor * key for key in keys]
            assert [float(row["least"]) for row in own] == [-key for key in keys]
            assert [float(row["most"]) for row in own] == [20 * key for key in keys]


def test_scaled_positions_stand_in_a_table(reported: Path) -> None:
    found = rows(reported / "ntk_perplexity_000064.csv")
    cells = [(row["positions"], float(row["64"]), float(row["256"])) for row in found]
    assert cells == [("as trained", 20.0, 900.5), ("dynamic_ntk-4", 21.0, 25.25)]


def test_passkeys_are_summed_over_depths(reported: Path) -> None:
    found = rows(reported / "passkey_000064.csv")
    numbers = [(int(row["length"]), int(row["right"]), int(row["prompts"])) for row in found]
    assert numbers == [(256, 6, 8), (512, 0, 4)]
    assert [float(row["share"]) for row in found] == [0.75, 0.0]


def test_captions_and_tables_say_under_which_options_results_were_measured(reported: Path) -> None:
    shown = " ".join("".join(Page((reported / "index.html").read_text()).texts).split())
    bos = "beginning-of-sequence id in front"
    perplexity = (
        f"stride in tokens: 16; first tokens read of each document: 512, all; {bos}: no, yes"
    )
    # Of the figure, and of the table of scalings.
    assert shown.count(perplexity) == 2
    assert shown.count(f"depths of keys: grid; {bos}: yes") == 1
    # Four figures of each scaling and the table, beside the two of perplexity.
    assert shown.count(f"{bos}: no") == 11
    found = rows(reported / "perplexity_000064.csv")
    assert [(row["positions"], row["document_tokens"], row["bos"]) for row in found[::2]] == [
        ("", "all", "yes"),
        ("dynamic_ntk-4", "512", "no"),
    ]
    found = rows(reported / "passkey_000064.csv")
    assert {(row["depths"], row["bos"]) for row in found} == {("grid", "yes")}


def test_recall_is_drawn_like_passkeys(reported: Path) -> None:
    found = rows(reported / "recall_000064.csv")
    cells = [(row["run"], int(row["pairs"]), float(row["share"])) for row in found]
    assert cells == [(n, p, s) for n in ("flagship", EVIL) for p, s in ((4, 0.75), (8, 0.1))]
    # Intervals are those of the table: answers of one sequence are not independent.
    assert [(row["low"], row["high"]) for row in found] == [
        ("0.5", "0.875"),
        ("0.0", "0.25"),
    ] * 2


def test_mixing_matrices_a_bigram_and_lm_eval_are_tables(reported: Path) -> None:
    (row,) = rows(reported / "attention_000064.csv")
    assert (row["run"], row["step"], row["positions"]) == ("flagship", "4", "as trained")
    assert [float(value) for value in list(row.values())[4:]] == [
        *(0.75, 0.5, 0.125, 4, 0.5),
        *(20, 32, 4, 1),
    ]
    assert "window, of which there were 8: the largest" in (reported / "index.html").read_text()
    (row,) = rows(reported / "bigram_000064.csv")
    assert (row["step"], float(row["bigram model"]), float(row["run's loss"])) == ("4", 3.5, 4.0)
    found = rows(reported / "lm_eval_000064.csv")
    assert [(row["metric"], row["value"], row["error"]) for row in found] == [
        ("gsm8k/exact_match/strict-match", "0.0", "nan"),
        ("longhaul_pairs/acc", "0.625", "0.0625"),
    ]


def test_one_order_goes_through_all_figures_and_tables(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(
        "longhaul.pipeline.reporting.folder.draw", lambda figure, _: drawn.append(figure)
    )
    monkeypatch.setattr(page, "_figure", lambda *_: "")
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    order = [
        "conformal_sympow p=2",
        "softmax",
        "softmax, dynamic_ntk-4",
        "softmax (running)",
    ]
    looks: dict[str, set[Any]] = {}
    for figure in drawn:
        labels = list(dict.fromkeys(series.label for series in figure.series))
        assert labels == [label for label in order if label in labels], figure.name
        for series in figure.series:
            looks.setdefault(series.label.partition(" ")[0].strip(","), set()).add(series.look)
    assert [len(found) for found in looks.values()] == [1, 1]
    by_position = {figure.name: figure.reference for figure in drawn}
    for name in ("loss_at_position", "loss_up_to_position"):
        assert by_position[f"{name}_000064"] == ("bigram model", 3.5)
    assert by_position["loss_up_to_position_000064_a-b.c"] is None
    (bins,) = (figure for figure in drawn if figure.name == "loss_at_position_000064")
    assert bins.series[0].windows is not None
    assert [bound[0] for bound in bins.series[0].windows] == pytest.approx([4.745, 5.245])
    (windows,) = (figure for figure in drawn if figure.name == "loss_in_windows_000064")
    assert windows.series[0].windows == ([4.25, 3.75], [4.75, 4.75])
    runs = [row["run"] for row in rows(tmp_path / "new" / "runs.csv")]
    assert runs == ["again", "flagship", "longer", EVIL, "cut off"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert main(["report", *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longhaul: ")
    return str(line)


def test_a_tilde_in_the_address_of_a_database_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    line = refused(["tests", str(tmp_path / "new"), "--uri", "sqlite:///~/m.db"], capsys)
    assert f"--uri: found no file {tmp_path}/m.db" in line


def test_what_cannot_be_reported_is_refused(
    store: Store, reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, uri = str(tmp_path / "new"), ["--uri", store.uri]
    named = refused(["nothing", new, *uri], capsys)
    assert named.endswith("found 'nothing', wanted one of 'tests'")
    assert "EXPERIMENT 'Default': found no runs, wanted a finished run" in refused(
        ["Default", new, *uri], capsys
    )
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").touch()
    assert "found 1 entries, wanted a new or empty folder" in refused(
        ["tests", str(full), *uri], capsys
    )
    (full / "mine.txt").unlink()
    full.rmdir()
    # Of a report, only what nobody changed is written over.
    changed = tmp_path / "changed"
    shutil.copytree(reported, changed)
    (changed / "mine.txt").touch()
    assert "found 'mine.txt', which report.sha256 does not list as it is now" in refused(
        ["tests", str(changed), *uri], capsys
    )
    (changed / "mine.txt").unlink()
    (changed / "runs.csv").write_text("my notes")
    assert "found 'runs.csv', which report.sha256 does not list as it is now" in refused(
        ["tests", str(changed), *uri], capsys
    )
    shutil.rmtree(changed)
    assert "--against: found 'retention', wanted conformal_sympow or softmax" in refused(
        ["tests", new, *uri, "--against", "retention"], capsys
    )
    assert "--runs: found 'nobody*', wanted some of " in refused(
        ["tests", new, *uri, "--runs", "longer,nobody*"], capsys
    )
    assert "--filter: found 'nonsense'" in refused(
        ["tests", new, *uri, "--filter", "nonsense"], capsys
    )
    assert "--sequences: found 0, wanted 1 or more" in refused(
        ["tests", new, *uri, "--sequences", "0"], capsys
    )
    assert "--sequences: found 33, wanted at most 32" in refused(
        ["tests", new, *uri, "--sequences", "33"], capsys
    )
    missing = tmp_path / "none.db"
    assert f"--uri: found no file {missing}" in refused(
        ["tests", new, "--uri", f"sqlite:///{missing}"], capsys
    )
    unreadable = refused(["tests", new, "--uri", f"sqlite:///{__file__}"], capsys, status=1)
    assert f"{__file__} cannot be read: DatabaseError: file is not a database" in unreadable
    assert "wanted sqlite:///FILE" in refused(["tests", new, "--uri", "mlruns"], capsys)
    nobody = refused(["tests", new, "--uri", "http://a:b@127.0.0.1:9"], capsys, status=1)
    assert "--uri: http://***@127.0.0.1:9 cannot be reached" in nobody
    assert not list(tmp_path.iterdir())


def test_no_finished_run_is_refused(
    empty_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.in_file(tmp_path, empty_store)
    store.add("one", status="RUNNING")
    store.add("two", status="FAILED")
    line = refused(["tests", str(tmp_path / "new"), "--uri", store.uri], capsys)
    assert "found 1 failed, 1 running, wanted a finished run" in line
    assert not (tmp_path / "new").exists()


def test_a_store_without_runs_names_no_experiment(
    empty_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["x", str(tmp_path / "new"), "--uri", f"sqlite:///{empty_store}"], capsys)
    assert line.endswith("EXPERIMENT: found 'x', and no experiment has a run")


def test_a_report_that_fails_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(page, "_runs", fail)
    monkeypatch.setattr("longhaul.pipeline.reporting.folder.draw", lambda *_: None)
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
def test_a_trained_and_evaluated_run_is_reported(make_run: Callable[[int], Run]) -> None:
    run = make_run(3)
    run.longhaul("train", "small.yaml")
    run.longhaul("evaluate", "small", "--tasks", "positions", "--context", "128")
    run.longhaul("evaluate", "small", "--tasks", "context")
    uri = f"sqlite:///{run.path}/mlflow.db"
    run.longhaul("report", "tests", "report", "--uri", uri)
    report = run.path / "report"
    (own,) = read_runs(uri, "tests")[0]
    in_mlflow = MlflowClient(uri).get_run(own.run_id)
    params = in_mlflow.data.params
    assert (params["parameters"], params["tokens"]) == (str(own.num_parameters), "1536")
    assert (params["data"], params["name"]) == ("shards/train", "small")
    assert params["hardware"].startswith("1 x ")
    assert params["commit"] == own.commit
    assert (params["data"], params["data_sha256"]) == (own.data.name, own.data.sha256)
    contexts = {one.tags[0].value: one.dataset.name for one in in_mlflow.inputs.dataset_inputs}
    assert contexts == {"training": "shards/train", "validation": "shards/validation"}
    shown = {name for name in in_mlflow.data.tags if not name.startswith("mlflow.")}
    ours = {"longhaul.checkpoint", "longhaul.run_key"}
    ours |= {"longhaul.uploaded.metrics", "longhaul.uploaded.evaluation"}
    assert shown == {"longhaul.attention", *ours}
    journal = (run.path / "small" / "logs" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in journal.splitlines()]
    logged = [line for line in lines if line["kind"] in ("train", "validation")]
    train = [line["values"] for line in logged if line["kind"] == "train"]
    curve = rows(report / "loss_against_tokens_000064.csv")
    assert [float(row["loss_nats"]) for row in curve] == [one["curves/train_loss"] for one in train]
    assert [int(row["tokens"]) for row in curve] == [one["train/tokens"] for one in train]
    assert own.final_loss == logged[-1]["values"]["curves/validation_loss"]
    folder = run.path / "small" / "evaluation"
    wanted = rows(folder / "step-000000003-context-128" / "positions.csv")
    found = rows(report / "loss_up_to_position_000064.csv")
    for name in ("mean_up_to_here", "standard_error_up_to_here", "standard_error"):
        assert [row[name] for row in wanted] == [f"{float(row[name]):.6f}" for row in found]
    bins = rows(folder / "step-000000003-context-128" / "loss_in_bins.csv")
    drawn = rows(report / "loss_at_position_000064.csv")
    assert [float(row["loss_nats"]) for row in bins] == [float(row["loss_nats"]) for row in drawn]
    assert {row["window"] for row in found} == {"128"}
    windows = rows(folder / "step-000000003" / "context.csv")
    assert len(rows(report / "loss_in_windows_000064.csv")) == len(windows)


@pytest.mark.soak
def test_a_server_is_read_like_a_database(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    stores = [
        "--backend-store-uri",
        "sqlite:///server.db",
        "--artifacts-destination",
        "./artifacts",
    ]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *stores], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        uri = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while True:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
                break
            time.sleep(0.2)
        store = Store(uri)
        store.evaluate(store.add("far"), "step-000000004", "positions", POSITIONS)
        assert main(["report", "tests", str(tmp_path / "new"), "--uri", uri]) == 0
        assert len(rows(tmp_path / "new" / "loss_up_to_position_000064.csv")) == 256
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
