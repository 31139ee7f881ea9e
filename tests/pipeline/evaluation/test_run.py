"""Positions and the bigram baseline, against plain loops."""

import csv
import dataclasses
import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.datamodules.config import DataConfig, SourceConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.resumable import Cursor, prepare_shards
from longhaul.datamodules.shards import Block
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.tasks import attention, passkey, perplexity, recall, scores
from longhaul.pipeline.evaluation.tasks.bigram import (
    count_bigrams,
    log_probabilities,
    pair_counts,
)
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture(scope="module")
def evaluated(uninterrupted: Run) -> Run:
    uninterrupted.longhaul("evaluate", "small", "--tasks", "positions,bigram")
    return uninterrupted


def test_bigram_is_the_smoothed_count() -> None:
    text = [0, 1, 0, 1, 2, 0, 1]
    table = log_probabilities(pair_counts(np.array(text[:-1]), np.array(text[1:]), 4)).exp()
    pairs, lefts = Counter(itertools.pairwise(text)), Counter(text[:-1])
    single = Counter(text[1:])
    total = sum(single.values()) + 4
    for a in range(4):
        assert table[a].sum().item() == pytest.approx(1)
        for b in range(4):
            prior = (single[b] + 1) / total
            assert table[a, b].item() == pytest.approx((pairs[a, b] + prior) / (lefts[a] + 1))


def write_block(folder: Path, block: Block) -> None:
    """Shards of one block of five tokens."""

    class Blocks:
        version = 1

        def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
            yield block, [1]

    template = Manifest(
        **{"tokenizer": "bytes", "tokenizer_sha256": "0", "vocab_size": 10, "bos_id": 8},
        **{"eot_id": 9, "document_tokens": 5, "dtype": "uint16"},
        boundaries="none" if block.ends is None else "ends",
        shards=(),
    )
    prepare_shards(
        folder,
        template,
        Blocks(),
        docs_per_shard=1,
        prefix="train",
        progress=lambda tokens: None,
    )


def test_bigrams_are_counted_as_documents_are_read(tmp_path: Path) -> None:
    ends = np.array([2, 5], np.uint32)
    write_block(tmp_path / "s", Block(np.array([1, 9, 2, 3, 9], np.uint16), ends))
    for has_mask, before in ((True, 8), (False, 9)):
        data = DataConfig(manifest=str(tmp_path / "s"), context=5, document_mask=has_mask)
        pairs = {(int(a), int(b)) for a, b in zip(*count_bigrams(data).nonzero(), strict=True)}
        assert pairs == {(1, 9), (before, 2), (2, 3), (3, 9)}


def test_bigrams_are_counted_where_one_of_two_sources_has_no_ends(tmp_path: Path) -> None:
    sources = {}
    for name, ends in (("with", np.array([2, 5], np.uint32)), ("without", None)):
        write_block(tmp_path / name, Block(np.array([1, 9, 2, 3, 9], np.uint16), ends))
        sources[name] = SourceConfig(manifest=str(tmp_path / name), weight=1)
    counts = count_bigrams(DataConfig(sources=sources, context=5))
    pairs = {(int(a), int(b)): int(counts[a, b]) for a, b in zip(*counts.nonzero(), strict=True)}
    assert pairs == {(1, 9): 2, (8, 2): 1, (9, 2): 1, (2, 3): 2, (3, 9): 2}


def test_evaluate_writes_what_a_plain_loop_finds(evaluated: Run) -> None:
    folder = evaluated.path / "small" / "evaluation" / "step-000000030"
    assert (folder / "positions.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "positions.csv").open()))
    trained = load_trained_model(evaluated.path / "small")
    data = TokenDataModule(
        trained.config.data, seed=0, samples_per_update=1, micro_batch=1, rank=0, world_size=1
    )
    losses = []
    for batch in data.val_dataloader():
        hidden, _ = trained.model.activations(batch["input"])
        logits = hidden[0] @ trained.model.embedding.weight.T
        losses.append(
            torch.nn.functional.cross_entropy(logits, batch["target"][0], reduction="none")
        )
    wanted = torch.stack(losses).double().mean(0)
    assert len(losses) == 6
    assert [int(row["position"]) for row in rows] == list(range(1, 65))
    found = torch.tensor([float(row["loss_nats"]) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    # The same losses in bins, here of one position each.
    bins = list(csv.DictReader((folder / "loss_in_bins.csv").open()))
    for row, of_bin in zip(rows, bins, strict=True):
        assert of_bin["first"] == of_bin["last"] == row["position"]
        for name in ("loss_nats", "standard_error", "samples"):
            assert of_bin[name] == row[name]
    assert (folder / "loss_in_bins.png").read_bytes().startswith(b"\x89PNG")
    of_windows = torch.stack(losses).double().mean(1)
    results = json.loads((folder / "results.json").read_text())
    error = of_windows.std().item() / math.sqrt(6)
    assert results["evaluation/loss_standard_error"] == pytest.approx(error, abs=1e-5)
    assert float(rows[-1]["standard_error_up_to_here"]) == pytest.approx(error, abs=1e-5)
    assert results["evaluation/loss"] == pytest.approx(wanted.mean().item(), abs=1e-5)
    assert 1 < results["evaluation/bigram_loss"] < math.log(257)


def test_evaluation_is_tracked_with_its_checkpoint(evaluated: Run) -> None:
    client = MlflowClient(f"sqlite:///{evaluated.path}/mlflow.db")
    run_id = (evaluated.path / "small" / "mlflow_run_id").read_text().strip()
    tracked = client.get_run(run_id)
    assert tracked.info.status == "FINISHED"
    artifacts = {item.path for item in client.list_artifacts(run_id, "evaluation/step-000000030")}
    assert {path.rsplit("/", 1)[-1] for path in artifacts} >= {"positions.csv", "positions.png"}
    assert "evaluation/bigram_loss" in tracked.data.metrics


@pytest.mark.wide
def test_a_task_done_is_repeated_only_on_demand(evaluated: Run) -> None:
    folder = evaluated.path / "small" / "evaluation" / "step-000000030"
    journal = evaluated.path / "small" / "logs" / "evaluation.jsonl"
    before, lines = (folder / "positions.csv").stat().st_mtime_ns, journal.read_text()
    result = evaluated.longhaul("evaluate", "small", "--tasks", "positions,bigram")
    assert result.stdout.startswith("step 30, /")
    assert result.stdout.count("results are already there") == 2
    assert "evaluation/bigram_loss" in result.stdout
    assert (folder / "positions.csv").stat().st_mtime_ns == before
    assert journal.read_text() == lines
    # A file that went is made again, and what other tasks found stays.
    (folder / "positions.png").unlink()
    result = evaluated.longhaul("evaluate", "small", "--tasks", "positions,bigram")
    assert result.stdout.count("results are already there") == 1
    assert (folder / "positions.png").exists()
    assert "evaluation/bigram_loss" in json.loads((folder / "results.json").read_text())
    again = evaluated.longhaul("evaluate", "small", "--tasks", "bigram", "--again")
    assert "results are already there" not in again.stdout


@pytest.mark.wide
def test_a_mistake_and_a_damaged_file_cost_no_earlier_result(evaluated: Run) -> None:
    given = ("evaluate", "small", "--tasks", "perplexity", "--contexts", "32")
    evaluated.longhaul(*given)
    folder = evaluated.path / "small" / "evaluation" / "step-000000030"
    before = json.loads((folder / "results.json").read_text())
    assert "evaluation/perplexity_000032" in before
    assert evaluated.longhaul(*given, "--stride", "0", check=False).returncode == 2
    assert json.loads((folder / "results.json").read_text()) == before
    (folder / "results.json").write_text("{bro")
    refused = evaluated.longhaul("export", "small", "new", check=False)
    assert refused.returncode == 2
    assert "results.json: found no JSON object, wanted what" in refused.stderr
    assert not (evaluated.path / "new").exists()
    assert "results are already there" in evaluated.longhaul(*given).stdout
    assert json.loads((folder / "results.json").read_text()) == before
    (folder / "perplexity.json").write_text("[]")
    again = evaluated.longhaul(*given)
    assert "perplexity.json is damaged: its task is measured again" in again.stderr
    assert json.loads((folder / "results.json").read_text()) == before


@pytest.mark.wide
def test_several_runs_are_measured_and_one_that_fails_is_named(
    evaluated: Run, empty_store: Path, tmp_path: Path
) -> None:
    for name in ("small", "small-2"):
        # Without its key, which would tell of a copy.
        ignore = shutil.ignore_patterns("logs")
        shutil.copytree(evaluated.path / "small", tmp_path / name, ignore=ignore)
    shutil.copy(empty_store, tmp_path / "mlflow.db")  # other tests count the runs in the first
    evaluated = type(evaluated)(tmp_path)
    (evaluated.path / "small-log.txt").touch()
    (evaluated.path / "small-sweep" / "configs").mkdir(parents=True)
    # As a shell expands small*; lengths of the task context are those of --context, too.
    runs = ("small", "small-log.txt", "small-sweep", "small-2")
    result = evaluated.longhaul(
        "evaluate", *runs, "--tasks", "context", "--context", "32,64", check=False
    )
    assert result.returncode == 1
    wanted = "wanted a run folder or one of its checkpoints"
    left_out, first, *_, last = result.stderr.splitlines()
    assert left_out == "longhaul: small-sweep: left out, the folder of a sweep"
    assert first == f"longhaul: small-log.txt: found no config.yaml, {wanted}"
    assert last == "longhaul: evaluate: found 1 of 3 that failed: small-log.txt"
    for name in ("small", "small-2"):
        rows = csv.DictReader(
            (evaluated.path / name / "evaluation" / "step-000000030" / "context.csv").open()
        )
        assert [row["context"] for row in rows] == ["32", "64"]
    twice = evaluated.longhaul("evaluate", "small", "small-2", "--tasks", "context", "--again")
    assert twice.stdout.count("step 30, /") == 2


@pytest.mark.wide
def test_windows_may_have_one_token(evaluated: Run) -> None:
    evaluated.longhaul("evaluate", "small", "--context", "1")
    folder = evaluated.path / "small" / "evaluation" / "step-000000030-context-1"
    (row,) = csv.DictReader((folder / "positions.csv").open())
    found = json.loads((folder / "results.json").read_text())
    assert float(row["loss_nats"]) == pytest.approx(found["evaluation/context-1/loss"], abs=1e-6)


def test_results_know_by_which_options_they_were_found(tmp_path: Path) -> None:
    results, text = Results(tmp_path, "held out"), tmp_path / "a.txt"
    text.write_text("one")
    options = perplexity.Options(text=(text,), stride=3)

    def keep(name: str, found: TaskResult) -> None:
        results.mark_complete(name, options, results.store(name, found))

    keep("x", TaskResult({"x/a": 1.0, "x/b": 2.0}))
    keep("y", TaskResult({"y/a": 3.0}))
    assert results.stored("x", options) == TaskResult({"x/a": 1.0, "x/b": 2.0})
    assert results.stored("x", dataclasses.replace(options, stride=4)) is None
    text.write_text("two")
    assert results.stored("x", options) is None
    # Interrupted from here on, nobody takes files of two attempts for one result.
    results.store("x", TaskResult({"x/b": 5.0}))
    text.write_text("one")
    assert results.stored("x", options) is None
    keep("x", TaskResult({"x/b": 5.0}))
    assert results.values() == {"y/a": 3.0, "x/b": 5.0}
    for damage in ("{bro", "[]", '{"values": {}, "files": 3, "options": {}}', ""):
        (tmp_path / "y.json").write_text(damage)
        assert results.stored("y", options) is None
        assert results.values() == {"x/b": 5.0}
    # Without a text of their own they are of the held-out one, which may become another.
    plain = dataclasses.replace(options, text=())
    results.mark_complete("x", plain, TaskResult({}))
    assert results.stored("x", plain) is not None
    assert Results(tmp_path, "another").stored("x", plain) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "small", "--tasks", "positons"], "--tasks: found 'positons'"),
        (["evaluate", "small", "--text", "no"], "--text: found no file no, wanted text in UTF-8"),
        (["evaluate", "nowhere"], "nowhere: found no such folder, wanted a run folder"),
        (["evaluate", "."], ".: found no config.yaml, wanted a run folder"),
        (["evaluate", "mine"], "mine: found no such folder; the run of this name is runs/mine"),
        (["evaluate", "small.yaml"], "small.yaml: found a config, wanted a run folder"),
        (
            ["evaluate", "small", "--tasks", "bigram,context", "--context", "64"],
            "--context: found with bigram,context, wanted --contexts for context, or a command for",
        ),
        (
            ["evaluate", "small", "--tasks", "bigram", "--context", "32,64"],
            "--context: found 32,64 with bigram, wanted one number, or the tasks context and",
        ),
        (
            ["evaluate", "small", "--tasks", "context", "--context", "32", "64"],
            "RUN: found 64, no such folder; numbers of one option have commas between them, such",
        ),
    ],
)
def test_bad_arguments_are_one_line(evaluated: Run, arguments: list[str], message: str) -> None:
    mine = evaluated.path / "runs" / "mine"
    mine.mkdir(parents=True, exist_ok=True)
    (mine / "config.yaml").touch()
    result = evaluated.longhaul(*arguments, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"longhaul: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_the_help_of_tasks_has_their_sizes() -> None:
    # It is made without importing the tasks, which takes seconds.
    assert f"at most {attention.LONGEST} tokens" in TASKS["attention"].help
    assert f"at most {scores.LONGEST} tokens" in TASKS["scores"].help
    assert f"from {recall.SIZES[0]} to {recall.SIZES[-1]} key-value pairs" in TASKS["recall"].help
    of_passkeys = TASKS["passkey"].options
    assert f"from {passkey.SHORTEST_PASSKEY} to" in of_passkeys["lengths"].help
    assert f"at each of {len(passkey.PASSKEY_DEPTHS)} depths" in of_passkeys["depths"].help
    for task in TASKS.values():
        found = {field.name: field.default for field in dataclasses.fields(task.module.Options)}
        assert {name: option.default for name, option in task.options.items()} == found
