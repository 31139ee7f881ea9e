"""A run from its start, over every interruption, to its end."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from longhaul.configs import load_run_config
from longhaul.datamodules.corpus import load_corpus
from longhaul.modules.pretraining import Update
from longhaul.modules.progress import Progress
from longhaul.pipeline.cli import main
from longhaul.pipeline.training.progress import ProgressLine

BRIEF = f"trainer.max_tokens={2 * 512}"

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def final_weights(run: Run, group: str = "model") -> dict[str, torch.Tensor]:
    files = max((run.path / "small" / "checkpoints").iterdir()).glob(f"{group}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(found: Run, wanted: Run) -> None:
    one, other = final_weights(found), final_weights(wanted)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def samples_of(run: Run) -> dict[tuple[int, int], int]:
    """Checksum of the tokens of every micro-batch, by step and first sample index."""
    seen: dict[tuple[int, int], int] = {}
    for line in run.trace.read_text().splitlines():
        entry = json.loads(line)
        key = entry["step"], entry["index"][0]
        assert seen.setdefault(key, entry["crc"]) == entry["crc"], "a repeated step differs"
    return seen


def mlflow_runs(run: Run) -> tuple[MlflowClient, list[mlflow.entities.Run]]:
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return client, list(client.search_runs([experiment.experiment_id]))


def assert_one_clean_run(run: Run, num_updates: int = 30) -> None:
    """One MLflow run, finished, with every step in it once."""
    client, runs = mlflow_runs(run)
    assert [tracked.info.status for tracked in runs] == ["FINISHED"]
    history = client.get_metric_history(runs[0].info.run_id, "curves/train_loss")
    assert sorted(metric.step for metric in history) == list(range(1, num_updates + 1))
    history = client.get_metric_history(runs[0].info.run_id, "curves/validation_loss")
    assert sorted(metric.step for metric in history) == list(range(10, num_updates + 1, 10))


def test_a_run_ends_tracked_and_done(uninterrupted: Run) -> None:
    folder = uninterrupted.path / "small"
    done = {"step": 30, "tokens": 30 * 512, "is_tracked": True}
    assert json.loads((folder / "DONE").read_text()) == done
    assert (folder / "environment.json").is_file()
    assert_one_clean_run(uninterrupted)
    client, (tracked,) = mlflow_runs(uninterrupted)
    assert (folder / "mlflow_run_id").read_text().strip() == tracked.info.run_id
    assert tracked.data.params["model.attention.kind"] == "conformal_sympow"
    for name in (
        "train/gradient_norm",
        "train/learning_rate",
        "train/tokens",
        "train/tokens_per_second",
        "train/step_seconds",
        "train/data_wait_seconds",
        "train/peak_memory_bytes",
        "train/skipped_updates",
        "validation/loss_at_000001",
        "validation/loss_at_000064",
    ):
        assert name in tracked.data.metrics, name
    losses = [
        m.value for m in client.get_metric_history(tracked.info.run_id, "curves/validation_loss")
    ]
    assert losses[-1] < losses[0] < 5.7
    samples = samples_of(uninterrupted)
    assert sorted(index for _, index in samples) == list(range(0, 30 * 8, 4))


@pytest.mark.wide
def test_a_run_that_is_killed_while_it_waits_for_mlflow_at_its_end_is_done(run: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
    process = run.start("train", "small.yaml", f"tracking.uri={away}")
    journal = run.path / "small" / "logs" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() or '"FINISHED"' not in journal.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.end()
    done = {"step": 30, "tokens": 30 * 512, "is_tracked": False}
    assert json.loads((run.path / "small" / "DONE").read_text()) == done
    assert "is finished" in run.longhaul("train", "small.yaml").stdout
    assert json.loads((run.path / "small" / "DONE").read_text()) == done | {"is_tracked": True}
    assert_one_clean_run(run)


def test_progress_lines_tell_the_time_left() -> None:
    show = ProgressLine("x", 3)
    told = []
    show._print = told.append  # type: ignore[method-assign]
    show.begin(Progress())
    for step in (1, 2, 3):
        show._last_line = -100.0
        show.update(Progress(step=step), Update(1.0, 1.0, 1.0, None), 1.0)
    assert [line.split()[-2] for line in told] == ["?", "00:00", "00:00"]


def test_a_finished_run_refuses_another_config(uninterrupted: Run) -> None:
    result = uninterrupted.longhaul("train", "small.yaml", "optim.learning_rate=1", check=False)
    expect_one_line(result, 2, "optim.learning_rate: found 1.0, wanted 0.003 as in")


def test_ctrl_c_is_one_line(run: Run) -> None:
    process = run.start("train", "small.yaml", "checkpoint.every_tokens=1000000")
    wait_for_steps(run, process, 10)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    *_, lost, last = error.splitlines()
    assert last == "longhaul: interrupted"
    assert re.match(
        r"longhaul: up to \d+ updates after step 0 are not saved; SIGTERM, or a file", lost
    )
    assert [tracked.info.status for tracked in mlflow_runs(run)[1]] == ["KILLED"]


def test_a_finished_run_without_intact_weights_says_so(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(uninterrupted.path / "small", tmp_path / "small")
    monkeypatch.chdir(uninterrupted.path)
    lost = "is finished, 15,360 tokens, but found no intact checkpoint of it"
    for checkpoint in (tmp_path / "small" / "checkpoints").iterdir():
        (checkpoint / "state.json").write_text("{}")
    assert main(["train", "small.yaml", f"root={tmp_path}"]) == 1
    assert lost in capsys.readouterr().err.splitlines()[-1]
    for command in (["generate", "--prompt", "x"], ["evaluate"]):  # a failure, not bad input
        assert main([*command, f"{tmp_path}/small"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert "found only damaged checkpoints, wanted an intact one" in said
    shutil.rmtree(tmp_path / "small" / "checkpoints")
    assert main(["train", "small.yaml", f"root={tmp_path}"]) == 1
    assert lost in capsys.readouterr().err.splitlines()[-1]


def test_training_a_finished_run_says_so(uninterrupted: Run) -> None:
    before = uninterrupted.trace.read_bytes()
    result = uninterrupted.longhaul("train", "small.yaml")
    assert "is finished: 15,360 tokens" in result.stdout
    assert uninterrupted.trace.read_bytes() == before


@pytest.mark.wide
def test_a_run_killed_just_before_its_end_is_ended(uninterrupted: Run) -> None:
    (uninterrupted.path / "small" / "DONE").unlink()
    before = final_weights(uninterrupted)
    # As if the variant's file had been another one until then.
    environment = uninterrupted.path / "small" / "environment.json"
    recorded = environment.read_text()
    other = json.loads(recorded) | {"attention_sha256": {"conformal_sympow": "0" * 64}}
    environment.write_text(json.dumps(other))
    result = uninterrupted.longhaul("train", "small.yaml")
    assert "resumed at step 30" in result.stdout
    (line,) = [one for one in result.stderr.splitlines() if "differs from the one that" in one]
    assert "small: the file of kind conformal_sympow differs" in line
    assert line.endswith("wanted 000000000000")
    assert json.loads(environment.read_text()) == other
    environment.write_text(recorded)
    assert (uninterrupted.path / "small" / "DONE").is_file()
    after = final_weights(uninterrupted)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert_one_clean_run(uninterrupted)


def wait_for_steps(run: Run, process: Any, count: int) -> None:
    """Until the process has begun `count` more micro-batches, or ended."""
    before = run.trace.read_bytes().count(b"\n") if run.trace.exists() else 0
    while process.poll() is None:
        if run.trace.exists() and run.trace.read_bytes().count(b"\n") >= before + count:
            return
        time.sleep(0.002)


def kill_at_random_moments(run: Run, times: int, steps: range) -> None:
    """kill -9 a run and its workers `times` times: in a step, a save, a validation."""
    chance = random.Random(times)
    killed = 0
    for _ in range(times):
        process = run.start("train", "small.yaml")
        wait_for_steps(run, process, chance.choice(steps))
        time.sleep(chance.random() * 0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
    assert killed == times


def test_kill_9_leaves_no_trace(run: Run, uninterrupted: Run) -> None:
    # A checkpoint is begun after each 8th micro-batch of 60, when the one before is on disk: every
    # start but the first is a resume.
    kill_at_random_moments(run, times=2, steps=range(17, 25))
    assert list((run.path / "small" / "checkpoints").glob("step-*"))
    run.longhaul("train", "small.yaml")
    assert_same_weights(run, uninterrupted)
    assert samples_of(run) == samples_of(uninterrupted)
    assert_one_clean_run(run)


@pytest.mark.soak
def test_kill_9_twenty_times_leaves_no_trace(make_run: Callable[[int], Run]) -> None:
    whole, run = make_run(500), make_run(500)
    whole.longhaul("train", "small.yaml")
    kill_at_random_moments(run, times=20, steps=range(1, 81))
    run.longhaul("train", "small.yaml")
    assert_same_weights(run, whole)
    assert samples_of(run) == samples_of(whole)
    assert_one_clean_run(run, num_updates=500)


@pytest.mark.wide
def test_two_processes_see_the_same_batches(run: Run, uninterrupted: Run) -> None:
    run.longhaul("train", "small.yaml", "trainer.strategy=ddp", "trainer.devices=2")
    assert samples_of(run) == samples_of(uninterrupted)
    one, other = final_weights(run), final_weights(uninterrupted)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    assert_one_clean_run(run)
    ours, theirs = (
        mlflow_runs(each)[1][0].data.metrics["curves/validation_loss"]
        for each in (run, uninterrupted)
    )
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.soak
def test_three_processes_with_two_workers_each_see_the_same_batches(
    make_run: Callable[..., Run],
) -> None:
    one, three = make_run(), make_run()
    # The papers' rate: five times it makes the rounding of sums in another order as large as 5e-5.
    common = ["optim.tokens_per_update=768", "trainer.micro_batch=2", "optim.learning_rate=6.0e-4"]
    one.longhaul("train", "small.yaml", *common, "data.workers=0")
    ranks = ["trainer.strategy=ddp", "trainer.devices=3", "data.workers=2"]
    three.longhaul("train", "small.yaml", *common, *ranks)
    seen = samples_of(three)
    assert seen == samples_of(one)
    assert sorted(seen) == [(index // 12, index) for index in range(0, 20 * 12, 2)]
    found, wanted = final_weights(three), final_weights(one)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.wide
def test_a_finished_run_whose_last_checkpoint_is_damaged_goes_on_before_it(run: Run) -> None:
    options = ("train", "small.yaml", f"trainer.max_tokens={8 * 512}")
    run.longhaul(*options)
    wanted = {name: tensor.clone() for name, tensor in final_weights(run).items()}
    checkpoints = run.path / "small" / "checkpoints"
    newest = max(checkpoints.iterdir())
    (file,) = newest.glob("model-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = run.longhaul(*options)
    assert f"{newest.name} is damaged: {file.name}" in result.stderr
    told = "small was finished, but found no intact checkpoint of its last step, 8; training goes "
    assert f"{told}on from step 4\n" in result.stderr
    assert "resumed at step 4" in result.stdout
    (checkpoints / f"{newest.name}.damaged").rename(run.path / "aside")
    found = final_weights(run)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((run.path / "small" / "DONE").read_text())["step"] == 8
    client, (tracked,) = mlflow_runs(run)
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "curves/train_loss")
    assert [metric.step for metric in history] == list(range(1, 9))
    assert "is finished: 4,096 tokens" in run.longhaul(*options).stdout


def test_damaged_checkpoints_alone_do_not_start_the_run_over(run: Run) -> None:
    options = ("train", "small.yaml", BRIEF)
    # Asked to stop by the file, it saves its first update and is not done.
    (run.path / "small").mkdir()
    (run.path / "small" / "STOP").touch()
    assert run.longhaul(*options, check=False).returncode == 75
    assert (run.path / "small" / "STOPPED").exists()
    for checkpoint in (run.path / "small" / "checkpoints").iterdir():
        (checkpoint / "model-00000-000.safetensors").unlink()
    result = run.longhaul(*options, check=False)
    assert result.returncode == 1
    assert "found only damaged checkpoints, wanted an intact one" in result.stderr.splitlines()[-1]


def test_sigterm_saves_ends_as_killed_and_resumes(run: Run, uninterrupted: Run) -> None:
    process = run.start("train", "small.yaml")
    wait_for_steps(run, process, 20)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 75, error
    assert "saved; run the same command to resume" in error.splitlines()[-1]
    assert [run.info.status for run in mlflow_runs(run)[1]] == ["KILLED"]
    run.longhaul("train", "small.yaml")
    assert_same_weights(run, uninterrupted)
    # Nothing draws from the generators today; a variant with dropout would.
    generators, wanted = (final_weights(each, "rng") for each in (run, uninterrupted))
    assert all(torch.equal(generators[name], wanted[name]) for name in wanted)
    # No update was lost, and so none was made twice.
    batches = [json.loads(line) for line in run.trace.read_text().splitlines()]
    assert len(batches) == len(samples_of(run))
    assert_one_clean_run(run)


def expect_one_line(result: Any, status: int, *parts: str) -> None:
    assert result.returncode == status, result.stderr
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


@pytest.mark.wide
def test_another_config_for_the_same_folder_is_refused(run: Run) -> None:
    run.longhaul("train", "small.yaml", BRIEF)
    before = {path: path.read_bytes() for path in (run.path / "small").glob("*.*")}
    result = run.longhaul("train", "small.yaml", "model.width=64", check=False)
    expect_one_line(result, 2, "model.width: found 64, wanted 32 as in")
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_in_use_is_refused(run: Run) -> None:
    command = ("train", "small.yaml", f"trainer.max_tokens={8 * 512}")
    process = run.start(*command)
    wait_for_steps(run, process, 1)
    process.send_signal(signal.SIGSTOP)
    result = run.longhaul(*command, check=False)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    expect_one_line(result, 73, "is being written by another process", f"pid {process.pid}")


def test_a_run_folder_that_cannot_be_written(run: Run) -> None:
    # root may write anywhere but into /sys, and under a file.
    result = run.longhaul("train", "small.yaml", "root=/sys/kernel", check=False)
    expect_one_line(result, 2, "root: found /sys/kernel, in which no folder can be made")
    result = run.longhaul("train", "small.yaml", f"root={run.path}/small.yaml", check=False)
    expect_one_line(result, 2, f"root: found {run.path}/small.yaml, in which no folder can be made")


def test_a_vocabulary_that_is_too_small_is_refused(run: Run) -> None:
    result = run.longhaul("train", "small.yaml", "model.vocabulary=128", check=False)
    expect_one_line(result, 2, "model.vocabulary: found 128, wanted at least 257")
    assert not (run.path / "small").exists()


def test_nodes_that_nothing_tells_of_each_other_are_refused(run: Run) -> None:
    result = run.longhaul(
        "train",
        "small.yaml",
        "trainer.strategy=ddp",
        "trainer.nodes=2",
        "trainer.micro_batch=2",
        check=False,
    )
    expect_one_line(result, 2, "trainer.nodes: found 2 outside of a Slurm job")


@pytest.mark.wide
def test_a_full_disk_stops_the_run_and_loses_nothing(run: Run) -> None:
    # A limit on the size of a file is a disk that a checkpoint does not fit on, and all else does.
    options = ("small.yaml", "model.width=256", "trainer.max_tokens=3072")
    limited = run.longhaul("train", *options, check=False, largest_file=4 << 20)
    expect_one_line(limited, 1, "checkpoint of step 4 could not be saved", "File too large")
    folder = run.path / "small"
    assert not list((folder / "checkpoints").iterdir())
    assert [tracked.info.status for tracked in mlflow_runs(run)[1]] == ["FAILED"]
    assert "Traceback" in (folder / "logs" / "train.log").read_text()
    run.longhaul("train", *options)
    assert (folder / "checkpoints" / "step-000000006").is_dir()
    client, runs = mlflow_runs(run)
    history = client.get_metric_history(runs[0].info.run_id, "curves/train_loss")
    assert sorted(metric.step for metric in history) == list(range(1, 7))


def test_a_run_without_validation_text_trains(run: Run) -> None:
    run.longhaul("train", "small.yaml", "data.validation_manifest=null", "data.workers=0", BRIEF)
    (tracked,) = mlflow_runs(run)[1]
    assert "curves/train_loss" in tracked.data.metrics
    assert "train/model_flops_utilisation" not in tracked.data.metrics  # of an unknown peak
    assert "curves/validation_loss" not in tracked.data.metrics
    result = run.longhaul("evaluate", "small", check=False)
    expect_one_line(result, 2, "data.validation_manifest: found null")


def damage_a_shard(run: Run, corpus: Path) -> tuple[str, list[str]]:
    """Cut the end off the shard that is read first; its name, and what trains on that copy."""
    copy = run.path / "damaged"
    shutil.copytree(corpus, copy)
    data = load_run_config(run.path / "small.yaml").data
    order = load_corpus(corpus / "train").training_order(data.context, 0, data.shuffle_shards)
    shard = sorted((copy / "train").glob("*.tar"))[order.locate_many(np.array([0])).shard[0]]
    shard.write_bytes(shard.read_bytes()[:-1000])
    manifests = f"data.manifest={copy}/train", f"data.validation_manifest={copy}/validation"
    return shard.name, list(manifests)


def test_a_missing_shard_is_refused_before_anything_is_written(
    run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name, manifests = damage_a_shard(run, corpus)
    (run.path / "damaged" / "train" / name).unlink()
    monkeypatch.chdir(run.path)
    assert main(["train", "small.yaml", *manifests]) == 2
    assert f"train/{name}: no such file" in capsys.readouterr().err
    assert not (run.path / "small").exists()


def test_a_truncated_shard_is_named(run: Run, corpus: Path) -> None:
    name, manifests = damage_a_shard(run, corpus)
    result = run.longhaul("train", "small.yaml", *manifests, check=False)
    expect_one_line(result, 2, name)
    assert [tracked.info.status for tracked in mlflow_runs(run)[1]] == ["FAILED"]


def test_a_replaced_shard_is_recorded(run: Run, corpus: Path) -> None:
    name, manifests = damage_a_shard(run, corpus)
    options = (*manifests, "data.on_bad_shard=replace", "data.max_bad_fraction=0.5", BRIEF)
    result = run.longhaul("train", "small.yaml", *options)
    assert name in result.stderr
    assert name in (run.path / "small" / "logs" / "train.log").read_text()
    assert mlflow_runs(run)[1][0].data.metrics["train/replaced_shards"] == 1


BAD_COMMANDS = (
    ["train", "nowhere.yaml"],
    ["train", "run/demo.yaml", "optim.lr=1"],
    ["evaluate", "."],
    ["x"],
)


@pytest.mark.parametrize("arguments", BAD_COMMANDS)
def test_bad_commands_are_one_line(arguments: list[str], run: Run) -> None:
    result = run.longhaul(*arguments, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("longhaul: ")


@pytest.mark.wide
def test_the_installed_command_ends_like_its_forks(tmp_path: Path, run: Run) -> None:
    # The other tests fork `longhaul` from a process that has imported it (conftest.py).
    command = [str(Path(sys.executable).parent / "longhaul"), *BAD_COMMANDS[1]]
    real = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    forked = run.longhaul(*BAD_COMMANDS[1], check=False)
    assert (real.returncode, real.stdout) == (2, "")
    assert real.stderr == forked.stderr
