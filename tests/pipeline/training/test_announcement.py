"""What a start says of the run, and what it warns of."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longhaul.configs import load_run_config
from longhaul.datamodules.corpus import load_corpus
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.manifest import load_manifest
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.training.announcement import config_warnings, summary

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
Warn = Callable[..., list[str]]
BEGINS_ANEW = "found no checkpoint of an earlier start of this run; training begins anew"


@pytest.fixture
def warn(run: Run) -> Warn:
    """The warnings of the small run with other values."""

    def told(*overrides: str, before: int | None = None, trained: int = 0) -> list[str]:
        config = load_run_config(run.path / "small.yaml", overrides)
        data = TokenDataModule(
            config.data, seed=0, samples_per_update=8, micro_batch=4, rank=0, world_size=1
        )
        trainer = dataclasses.replace(config.trainer, max_tokens=before or 1)
        stored = None if before is None else dataclasses.replace(config, trainer=trainer)
        return list(config_warnings(config, data, stored, trained))

    return told


def test_a_run_that_does_what_it_seems_to_is_not_warned_of(warn: Warn) -> None:
    assert warn() == []
    # Each has one update left.
    assert warn("optim.larger_updates=[{at_tokens: 14336, factor: 2}]") == []
    assert warn("data.short_first=[{context: 32, until_tokens: 14848}]") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trainer.max_tokens=2048"],
            "optim.schedule.warmup_tokens: the budget of 2,048 tokens ends within the warm-up of "
            "2,048; the learning rate only rises",
        ),
        (
            ["optim.schedule.name=wsd", "optim.schedule.decay_tokens=15000"],
            "optim.schedule.decay_tokens: a decay of 15,000 of 15,360 tokens begins within the "
            "warm-up of 2,048",
        ),
        (
            ["trainer.max_tokens=15000"],
            "trainer.max_tokens: 15,000 are no whole number of updates of 512 tokens, so 15,360 "
            "are trained",
        ),
        (
            ["data.validation_tokens=1000000"],
            r"data.validation_tokens: .* has [\d,]+ of the 1,000,",
        ),
        (
            ["optim.larger_updates=[{at_tokens: 15000, factor: 2}]"],
            "optim.larger_updates.0.at_tokens: the budget of 15,360 tokens has no update after "
            "15,000; what was to change there does not",
        ),
        (
            ["data.short_first=[{context: 8, until_tokens: 9k}, {context: 32, until_tokens: 2M}]"],
            "data.short_first.1.until_tokens: the budget of 15,360 tokens has no update after 2,",
        ),
    ],
)
def test_what_may_not_be_meant_is_one_line(warn: Warn, overrides: list[str], said: str) -> None:
    (line,) = warn(*overrides)
    assert re.match(said, line)


def test_another_budget_than_before_is_told(warn: Warn) -> None:
    assert warn(before=10240) == [
        BEGINS_ANEW,
        "trainer.max_tokens: found 15360, 10240 before; the learning rate schedule ends there",
    ]


def test_a_start_after_one_that_saved_nothing_is_told(warn: Warn) -> None:
    assert warn(before=15360, trained=0) == [BEGINS_ANEW]
    assert warn(before=15360, trained=512) == []


def test_a_rate_that_rises_again_is_told(warn: Warn) -> None:
    wsd = ("optim.schedule.name=wsd", "optim.schedule.decay_tokens=5120")
    more = ("trainer.max_tokens=30720", *wsd)
    told = "trainer.max_tokens: found 30720, 15360 before; the learning rate schedule ends there"
    assert warn(*more, before=15360, trained=15360) == [
        f"{told}; at this step the rate jumps from 0 to 0.003"
    ]
    assert warn(*more, before=15360, trained=10240) == [told]  # before the decay
    assert warn(*more, before=15360) == [BEGINS_ANEW, told]


def test_a_validation_set_of_another_corpus_is_told(
    warn: Warn, corpus: Path, tmp_path: Path
) -> None:
    # A preset's validation set stays where another training set is named. Here it has another
    # source too, as every other corpus has.
    shutil.copytree(corpus / "train", tmp_path / "other" / "train")
    (line,) = warn(f"data.manifest={tmp_path}/other/train")
    assert line == (
        f"data.validation_manifest: {corpus}/validation/manifest.json is of another corpus than "
        f"data.manifest, {tmp_path}/other/train/manifest.json"
    )
    # The two parts of one corpus may lie in different places.
    moved = tmp_path / "moved" / "validation"
    moved.mkdir(parents=True)
    source = {**load_manifest(corpus / "train").source, "split": "validation"}
    dataclasses.replace(load_manifest(corpus / "validation"), source=source).save(moved)
    assert warn(f"data.validation_manifest={moved}") == []


def test_the_summary_names_budget_devices_and_places(run: Run, corpus: Path) -> None:
    config = load_run_config(run.path / "small.yaml")
    train = load_corpus(corpus / "train")
    data: Any = SimpleNamespace(corpus=train)
    cpu = torch.device("cpu")
    budget, places = summary(config, RunFolder.of(config), data, 1234, cpu)
    epochs = 15360 / train.num_tokens
    assert budget.startswith(
        f"1,234 parameters, conformal_sympow; 15,360 tokens in 30 updates are {epochs:.3g} epochs"
    )
    assert f"{train.dropped_tokens:,} more did not fill a block" in budget
    assert "single, 1 rank, 32-true" in places
    brief = load_run_config(run.path / "small.yaml", ["trainer.max_tokens=512"])
    said = summary(brief, RunFolder.of(brief), data, 1, cpu)[0]
    assert "; 512 tokens in 1 update are " in said
    assert places.endswith(
        f"run folder {run.path}/small; MLflow sqlite:///{run.path}/mlflow.db, experiment tests"
    )


def test_the_log_has_what_was_shown(uninterrupted: Run) -> None:
    text = (uninterrupted.path / "small" / "logs" / "train.log").read_text()
    assert len(re.findall(r"[\d,]+ parameters, conformal_sympow; ", text)) == 1
    assert re.search(r"step 30/30  loss [\d.]+  ", text)
    assert re.search(r"step 10/30  validation loss [\d.]+\n", text)
