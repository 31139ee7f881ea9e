"""Pretraining and TokenDataModule in a plain lightning.Trainer: docs/scripts/stock_trainer.py."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from mlflow.tracking import MlflowClient

from longhaul.configs import load_run_config
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.language_model import LanguageModel

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "stock_trainer.py"
SHARDS = (("manifest", "train"), ("validation_manifest", "validation"))
SMALL = (
    *("model.width=32", "model.layers=2", "model.heads=2", "data.context=64", "data.workers=0"),
    *("data.validation_tokens=320", "optim.tokens_per_update=512", "trainer.micro_batch=4"),
    *("optim.schedule.warmup_tokens=1024", "optim.schedule.decay_tokens=1024"),
    "trainer.max_tokens=16384",
)


def train(corpus: Path, updates: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the last checkpoint holds, loaded without pickle."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["stock_trainer.py", str(corpus), str(updates), *SMALL])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def test_it_trains_validates_logs_and_resumes_to_the_bit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(corpus, 10, tmp_path / "whole", monkeypatch)
    assert whole["global_step"] == 10
    assert whole["progress"]["samples"] == 80
    store = MlflowClient(f"sqlite:///{tmp_path}/whole/mlflow.db")
    experiment = store.get_experiment_by_name("stock")
    (run,) = store.search_runs([experiment.experiment_id])
    losses = store.get_metric_history(run.info.run_id, "train/loss")
    assert [one.step for one in losses] == list(range(1, 11))
    (validation,) = store.get_metric_history(run.info.run_id, "validation/loss")
    assert validation.step == 10
    # Of the five samples alone; the second batch is filled up to four.
    places = [f"data.{key}={corpus}/{split}" for key, split in SHARDS]
    config = load_run_config("run/demo.yaml", [*places, *SMALL])
    data = TokenDataModule(
        config.data, seed=0, samples_per_update=5, micro_batch=5, rank=0, world_size=1
    )
    (batch,) = data.val_dataloader()
    assert (batch["index"] >= 0).all()
    model = LanguageModel(config.model)
    model.load_state_dict({n.removeprefix("model."): x for n, x in whole["state_dict"].items()})
    expected = model.loss(batch["input"], batch["target"]).item()
    assert validation.value == pytest.approx(expected, abs=1e-5)
    assert losses[-1].value < losses[0].value

    train(corpus, 5, tmp_path / "parts", monkeypatch)
    parts = train(corpus, 10, tmp_path / "parts", monkeypatch)
    assert parts["progress"] == whole["progress"]
    assert all(torch.equal(x, parts["state_dict"][n]) for n, x in whole["state_dict"].items())


@pytest.mark.wide
def test_two_ranks_of_ddp_train_on_the_same_samples(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = train(corpus, 5, tmp_path / "one", monkeypatch)
    (tmp_path / "two").mkdir()
    file = tmp_path / "two" / "script.py"
    two_ranks = 'lightning.Trainer(\n        devices=2, accelerator="cpu", strategy="ddp",'
    file.write_text(SCRIPT.read_text().replace("lightning.Trainer(", two_ranks))
    command = [sys.executable, str(file), str(corpus), "5", *SMALL]
    subprocess.run(command, check=True, cwd=file.parent, capture_output=True)
    two = torch.load(file.parent / "checkpoints" / "last.ckpt", weights_only=True)
    assert two["progress"]["samples"] == one["progress"]["samples"]
    for name, x in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], x, rtol=0, atol=1e-5)


def test_what_a_plain_trainer_cannot_do_is_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy

    from longhaul.modules.pretraining import _Stock

    with pytest.raises(ValueError, match="strategy: found ModelParallelStrategy, wanted"):
        _Stock(ModelParallelStrategy())
    scaling = DDPStrategy(precision_plugin=MixedPrecision("16-mixed", "cpu"))
    with pytest.raises(ValueError, match="precision: found 16-mixed, wanted one that scales no"):
        _Stock(scaling)


def test_where_a_plain_trainer_begins_is_what_its_checkpoint_says(corpus: Path) -> None:
    config = load_run_config("run/demo.yaml", [f"data.manifest={corpus}/train", *SMALL]).data
    with pytest.raises(ValueError, match="first_sample, num_samples: found 8 and None without"):
        TokenDataModule(config, seed=0, samples_per_update=8, micro_batch=4, first_sample=8)
