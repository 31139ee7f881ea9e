"""`longhaul bench train`: two kinds, three updates, one table."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longhaul.pipeline.benchmarks import kinds, masks, trainer
from longhaul.pipeline.cli import main
from longhaul.pipeline.terminal.numbers import in_bytes

KINDS = ["softmax", "retention:swish_gate=true"]
NAMES = ["bench-softmax-32-true", "bench-retention-swish_gate-true-32-true"]
CONTEXT, UPDATES, LAYERS, WIDTH = 64, 3, 2, 32


@pytest.fixture(scope="module")
def folder(make_run: Any) -> Path:
    """With `small.yaml` in it; one for all tests, since each new MLflow store takes seconds."""
    path: Path = make_run().path
    return path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder. Any model, even after three updates, beats the baseline."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(kinds, "bigram_loss", lambda *_: 10.0)
    monkeypatch.setattr(trainer, "run", lambda config: print(f"measured {config.name}"))
    return folder


def bench_of(*rows: str) -> int:
    return main(["bench", "train", "small.yaml", "--kinds", *rows, "--updates", f"{UPDATES}"])


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the table's rows, by their first."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.wide
def test_rows_are_trained_once_and_tabled(
    bench: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fork: Any
) -> None:
    def start(command: list[str]) -> Any:
        assert command[:3] == [sys.executable, "-P", "-c"]
        return fork(command[3], bench, *command[4:])

    with monkeypatch.context() as patch:
        # test_a_run_that_fails_is_a_row has real processes, which must import everything.
        patch.setattr(kinds, "subprocess", SimpleNamespace(Popen=start))
        assert bench_of(*KINDS) == 0
    out = capsys.readouterr().out
    assert out.startswith("measured small\n")
    table = (bench / "runs" / "bench" / "TABLE-32-true.md").read_text()
    assert table in out
    assert f"32-true, small.yaml: {UPDATES} updates, {512 * UPDATES:,} tokens" in table
    assert "that of a bigram model is 10.000" in table
    rows = rows_of(table)
    assert rows.pop("kind")[3] == "of softmax"
    assert sorted(rows) == sorted(KINDS)
    losses = [float(row[0]) for row in rows.values()]
    assert losses == sorted(losses)
    assert all(loss < 6 for loss in losses)
    assert rows["softmax"][1:2] + rows["softmax"][3:4] == ["below", "1.00"]
    cache = 2 * LAYERS * CONTEXT * WIDTH * 2  # keys and values, bytes
    assert rows["softmax"][4] == in_bytes(cache)
    journals = []
    for name, kind in zip(NAMES, KINDS, strict=True):
        folder = bench / "runs" / "bench" / name
        assert json.loads((folder / "DONE").read_text())["step"] == UPDATES
        journals.append(folder / "logs" / "metrics.jsonl")
        validation = re.findall('"curves/validation_loss": ([0-9.]+)', journals[-1].read_text())
        assert f"{float(validation[-1]):.3f}" == rows[kind][0]

    # Again, without a Python to train in; and one value of the journal is not finite now.
    monkeypatch.setattr(sys, "executable", "/no/python")
    text = journals[1].read_text()
    journals[1].write_text(
        re.sub('"curves/train_loss": [0-9.]+', '"curves/train_loss": "NaN"', text, count=1)
    )
    assert bench_of(*KINDS) == 0
    out, _ = capsys.readouterr()
    assert rows_of(out)[KINDS[1]][1] == "not finite"
    assert out.endswith(f"1 of 2 rows are not below the bigram: {KINDS[1]} (not finite)\n")
    monkeypatch.setattr(kinds, "bigram_loss", lambda *_: 1.0)
    assert bench_of("softmax") == 0
    assert capsys.readouterr().out.endswith("not below the bigram: softmax (ABOVE)\n")

    status = main(["bench", "train", "small.yaml", "--kinds", "softmax", "--updates", "4"])
    expected = f"trainer.max_tokens: found {512 * 4}, wanted {512 * UPDATES} as in "
    assert status == 2
    assert capsys.readouterr().err.startswith(f"longhaul: {expected}")


@pytest.mark.wide
def test_rows_with_documents_are_timed_beside_whole_rows(
    bench: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    update = masks._update
    monkeypatch.setattr(masks, "_ROUNDS", 2)
    monkeypatch.setattr(
        masks, "_update", lambda *of: (given.append(of[-1] is not None), update(*of))[1]
    )
    assert main(["bench", "masks", "small.yaml", "--kinds", *KINDS]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows.pop("kind") == ["whole rows", "documents of 16", "documents of 128"]
    assert sorted(rows) == sorted(KINDS)
    assert all(float(ratio) > 0 for row in rows.values() for ratio in row[1:])
    assert given == 4 * [False, True, True]


@pytest.mark.soak
def test_costs_of_trainer_and_checkpoints_are_printed(run: Any, fork: Any) -> None:
    short = """import sys
from longhaul.pipeline import cli
from longhaul.pipeline.benchmarks import checkpoints, trainer
trainer._WARM_UP = trainer._UPDATES = 1
checkpoints._SAVES = 1
sys.exit(cli.main())"""
    given = ["small.yaml", "model.layers=1", "model.attention.kind=retention"]
    process = fork(short, run.path, "bench", "train", *given, "--kinds")
    out, error = process.communicate()
    assert process.returncode == 0, error
    number = r"-?[\d.e+]+"
    for row in ("time", "processor time, all threads"):
        pattern = rf"\| {row} \| ({number}) ms \| ({number}) ms \| ({number}) \|"
        (found,) = re.findall(pattern, out)
        ours, bare, ratio = map(float, found)
        assert ours / bare == pytest.approx(ratio, rel=1e-2)
    # 320 x 32 of the embedding and a block, of which the optimizer has two moments.
    weights = re.findall(r"Checkpoint of (\d+) kB, with (\d+) kB of weights", out)
    assert len(weights) == 1
    assert int(weights[0][0]) == pytest.approx(3 * int(weights[0][1]), rel=0.02)
    for way in ("blocking", "asynchronous"):
        assert len(re.findall(rf"\| {way} \| {number} ms \| \d+ \| {number} ms \| ", out)) == 1
    # Nothing stays, and no table is made.
    assert list((run.path / "runs" / "bench").iterdir()) == []


@pytest.mark.wide
@pytest.mark.usefixtures("bench")
def test_a_run_that_fails_is_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_LONGHAUL", "raise SystemExit(1)")
    assert bench_of("alibi") == 0
    out, error = capsys.readouterr()
    assert rows_of(out)["alibi"][:2] == ["nan", "stopped"]
    assert out.endswith("1 of 1 rows are not below the bigram: alibi (stopped)\n")
    monkeypatch.setattr(kinds, "_LONGHAUL", "raise SystemExit(2)")
    assert bench_of("alibi", "coca") == 1
    out, error = capsys.readouterr()
    assert "row 2" not in out
    assert error.endswith("bench-alibi-32-true: training ended with status 2, wanted 0\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.manifest=nowhere", "nowhere"),
        ("trainer.strategy=ddp", "trainer.strategy: found ddp, wanted single: the bare loop"),
        ("model.attention.kind=sofmax", "model.attention.kind: found 'sofmax', wanted one of"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    folder: Path,
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["bench", "train", "small.yaml", override, "--kinds"]) in (1, 2)
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "softmax", "sofmax"], "model.attention.kind: found 'sofmax', wanted one of"),
        (["--kinds", "softmax:bas=1"], "model.attention.bas: unknown key, wanted one of short"),
        (["--kinds", "softmax:"], "command line: found 'model.attention.', wanted key.sub=value"),
        (["--updates", "0"], "--updates: found 0, wanted 1 or more"),
        (["name=x"], "name: found 'name=x', wanted no value, since every row has its own"),
        (["model.attention.kind=alibi"], "model.attention.kind: found 'model.attention.kind=alib"),
        (["data.manifest=nowhere", "--kinds", "softmax"], "nowhere"),
        (["name=x", "--kinds"], "name: found 'name=x', wanted no value, since every row has"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", "small.yaml", *arguments]) in (1, 2)
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert len(error.splitlines()) == 1
