"""Which metrics an update has, and what they count."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longhaul.configs import load_run_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.pretraining import Update
from longhaul.modules.progress import Progress
from longhaul.pipeline.training import callback, recorder
from longhaul.pipeline.training.recorder import RankReport, Recorder, training_flops


def test_what_torch_keeps_of_a_gpu_is_recorded_beside_what_tensors_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert callback._reserved_memory(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    assert callback._reserved_memory(torch.device("cuda")) == 7
    logged: dict[str, float] = {}
    this: Any = SimpleNamespace(
        _config=load_run_config("run/demo.yaml"),
        _progress_line=SimpleNamespace(update=lambda *_: None),
        _record_ranks=lambda *_: None,
        _pending={},
        _data=SimpleNamespace(read_by=lambda samples: {}),
        _peak_tokens_per_second=None,
        tracker=SimpleNamespace(log=lambda group, step, values: logged.update(values)),
    )
    zeros = RankReport(*[0.0] * len(RankReport._fields))._replace(seconds=1.0, peak_bytes=5)
    for reserved in (0, 7):
        ranks = [zeros, zeros._replace(reserved_bytes=reserved)]
        assert "train/reserved_memory_bytes" not in logged
        Recorder.record(this, Progress(step=1), Update(1.0, 1.0, 1.0, None), ranks, 0)
    assert logged["train/peak_memory_bytes"] == 5
    assert logged["train/reserved_memory_bytes"] == 7


@pytest.mark.parametrize("context", [4096, 8192])
def test_utilisation_counts_the_form_that_the_device_computes(context: int) -> None:
    with torch.device("meta"):
        model = LanguageModel(load_run_config("run/demo.yaml", ["model.layers=1"]).model)
    for device, backend in (("cuda", "triton"), ("cpu", "torch")):
        found = training_flops(model, context, torch.device(device))
        assert found == 3 * (model.weight_flops() + model.mixing_flops(context, backend))
    assert model.mixing_flops(context, "triton") != model.mixing_flops(context, "torch")


def test_utilisation_is_of_the_peak_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = load_run_config("run/demo.yaml", ["model.layers=1"]), torch.device("cuda")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    monkeypatch.setattr(recorder, "peak_flops", lambda precision: 1e12)
    for name in ("record_data", "summary", "config_warnings"):
        monkeypatch.setattr(recorder, name, lambda *_: ())
    logged: dict[str, float] = {}
    tracker: Any = SimpleNamespace(
        start=lambda: None, log=lambda group, step, values: logged.update(values)
    )
    folder: Any = SimpleNamespace(
        config_file=Path("none"), log_file=Path("none"), record_start=lambda config: None
    )
    data: Any = SimpleNamespace(corpus=None, read_by=lambda samples: {})
    this = Recorder(config, folder, tracker, data, 0, None)
    this.begin(Progress(), None, model, ["a", "b"], device)
    report = RankReport(*[0.0] * len(RankReport._fields))._replace(seconds=0.5)
    report = report._replace(communication=math.nan)
    this.record(Progress(step=1), Update(1.0, 1.0, 1.0, None), [report, report], 0)
    this.end()
    rate = config.optim.tokens_per_update / 0.5
    wanted = rate * training_flops(model, config.data.context, device) / 2e12
    assert logged["train/model_flops_utilisation"] == pytest.approx(wanted)
