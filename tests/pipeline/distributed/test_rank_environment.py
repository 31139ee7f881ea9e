"""What CUDA and NCCL are told before they start, and that a deterministic run repeats itself."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longhaul.configs import load_run_config
from longhaul.configs.run_config import RunConfig
from longhaul.pipeline.cli import main
from longhaul.pipeline.distributed import strategies
from longhaul.pipeline.distributed.rank_environment import rank_environment
from longhaul.pipeline.training import run as training
from longhaul.pipeline.training.run import _build_trainer

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

TWO_RANKS = ("trainer.strategy=ddp", "trainer.devices=2", "trainer.micro_batch=2")


def config(*overrides: str) -> RunConfig:
    return load_run_config("run/demo.yaml", ["root=runs", *overrides])


def test_a_run_on_cpus_sees_no_gpu() -> None:
    found = rank_environment(config("trainer.deterministic=true"), {}, gpu=False)
    assert found == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("nodes", "given", "system", "lazy"),
    [
        (9, {}, "linux", {"TORCH_GLOO_LAZY_INIT": "1"}),
        (8, {}, "linux", {}),
        (9, {}, "darwin", {}),
        (9, {"TORCH_GLOO_LAZY_INIT": "0"}, "linux", {}),
    ],
)
def test_many_ranks_connect_when_they_exchange_something(
    nodes: int,
    given: dict[str, str],
    system: str,
    lazy: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", system)
    many = (f"trainer.nodes={nodes}", "trainer.devices=8", "trainer.strategy=fsdp")
    asked = config(*many, "trainer.micro_batch=1", "optim.tokens_per_update=294912")
    assert rank_environment(asked, given, gpu=False) == {**lazy, "CUDA_VISIBLE_DEVICES": ""}


def test_nccl_records_into_the_run_folder_unless_told_otherwise() -> None:
    found = rank_environment(config(), {}, gpu=True)
    record = f"{Path.cwd()}/runs/demo/logs/nccl-rank-"
    assert found == {"TORCH_FR_DUMP_TEMP_FILE": record}
    assert rank_environment(config(), {"TORCH_FR_DUMP_TEMP_FILE": "/x"}, gpu=True) == {}


def test_a_deterministic_run_fixes_how_cublas_and_nccl_sum() -> None:
    given = {"NCCL_NVLS_ENABLE": "1", "TORCH_FR_DUMP_TEMP_FILE": "/x"}
    assert rank_environment(config("trainer.deterministic=true"), given, gpu=True) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }


def test_a_deterministic_run_takes_torchs_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Lightning sets a variable of cuBLAS
    try:
        _build_trainer(config("trainer.deterministic=true"), ())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_they_are_set_before_a_training_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("trainer.deterministic=true")
    wanted = rank_environment(asked, {}, gpu=True)
    environment = {name: value for name, value in os.environ.items() if name not in wanted}
    monkeypatch.setattr(os, "environ", environment)

    def stop(*args: Any, **options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(training, "uses_gpu", lambda accelerator: True)
    monkeypatch.setattr(training, "seed_everything", stop)  # it seeds CUDA's generators too
    with pytest.raises(InterruptedError):
        training.train(asked)
    assert wanted.items() <= environment.items()


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_buckets_of_gradients_stay_as_they_are_in_a_deterministic_run(
    is_deterministic: bool,
) -> None:
    overrides = (*TWO_RANKS, f"trainer.deterministic={str(is_deterministic).lower()}")
    strategy: Any = strategies.build_strategy(config(*overrides), [torch.device("cpu")])
    assert strategy._ddp_kwargs["find_unused_parameters"] is is_deterministic


def test_compiled_prefix_sums_are_refused_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("trainer.compile=true", "trainer.deterministic=true")
    assert main(["config", "run/demo.yaml", *overrides]) == 2
    assert "trainer.compile: found true with trainer.deterministic" in capsys.readouterr().err


@pytest.mark.wide
def test_a_deterministic_run_resumes_to_the_bit(run: Run, uninterrupted: Run) -> None:
    process = run.start("train", "small.yaml", "trainer.deterministic=true")
    run.wait_for_step(process, 8)
    (run.path / "small" / "STOP").touch()
    assert process.wait() == 75
    run.longhaul("train", "small.yaml", "trainer.deterministic=true")
    # On CPUs, torch's other algorithms are deterministic too.
    assert final_weights(run) == final_weights(uninterrupted)


@pytest.mark.soak
def test_three_deterministic_ranks_resume_to_the_bit(make_run: Any) -> None:
    """A sum over three ranks depends on their order, and so on a gradient's place in its bucket."""
    three = ("trainer.strategy=ddp", "trainer.devices=3", "trainer.micro_batch=2")
    sizes = ("optim.tokens_per_update=768", "data.workers=0")
    command = ("train", "small.yaml", *three, *sizes, "trainer.deterministic=true")
    whole, stopped = make_run(15), make_run(15)
    whole.longhaul(*command)
    process = stopped.start(*command)
    stopped.wait_for_step(process, 3)
    (stopped.path / "small" / "STOP").touch()
    assert process.wait() == 75
    stopped.longhaul(*command)
    assert final_weights(stopped) == final_weights(whole)


def final_weights(run: Run) -> dict[str, list[float]]:
    newest = max((run.path / "small" / "checkpoints").iterdir())
    return {
        name: tensor.flatten().tolist()
        for file in newest.glob("model-*.safetensors")
        for name, tensor in load_file(file).items()
    }
