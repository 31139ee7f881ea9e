"""What a run refuses of launchers and devices; the GPUs and the launchers are pretended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from longhaul.configs import ConfigError, RunConfig, load_run_config
from longhaul.pipeline.cli import main
from longhaul.pipeline.distributed.launch import check_launched, rank_devices
from longhaul.pipeline.training.run import _build_trainer


@pytest.fixture(autouse=True)
def _rank_of_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning keeps a process's rank; as another rank's, its loggers would write nothing."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


def slurm(tasks: int, nodes: int = 1, *, local: int = 0) -> dict[str, str]:
    """Variables of one task of a job step."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks // nodes),
        "SLURM_PROCID": str(local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": "0",
    }


def batch_script(tasks: int) -> dict[str, str]:
    """Variables of a batch script, which is no task."""
    return {name: value for name, value in slurm(tasks).items() if name != "SLURM_STEP_ID"}


def torchrun(ranks: int, nodes: int = 1) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks // nodes),
        "GROUP_WORLD_SIZE": str(nodes),
    }


def salloc(tasks: int) -> dict[str, str]:
    """Variables of a step in an allocation that salloc has made, for a user to type in."""
    return {
        **slurm(tasks),
        "SLURM_JOB_NAME": "interactive",
        "SLURM_STEP_NUM_TASKS": str(tasks),
    }


def jsrun(ranks: int) -> dict[str, str]:
    return {
        "LSB_JOBID": "1",
        "LSB_DJOB_RANKFILE": "hosts",
        "JSM_NAMESPACE_LOCAL_RANK": "0",
        "JSM_NAMESPACE_RANK": "0",
        "JSM_NAMESPACE_SIZE": str(ranks),
    }


def by_hand() -> dict[str, str]:
    return {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "0"}


def config(devices: int, nodes: int = 1, *overrides: str) -> RunConfig:
    strategy = "single" if devices * nodes == 1 else "ddp"
    return load_run_config(
        "run/demo.yaml",
        [
            "trainer.micro_batch=1",
            f"trainer.devices={devices}",
            f"trainer.nodes={nodes}",
            f"trainer.strategy={strategy}",
            *overrides,
        ],
    )


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that a launcher has started this process."""

    def start(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return start


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that so many GPUs are visible."""

    def show(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return show


@pytest.mark.parametrize("variables", [slurm(1), torchrun(1)])
def test_one_process_of_two_ranks_is_refused_in_one_line(
    variables: dict[str, str],
    launch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch(variables)
    monkeypatch.chdir(tmp_path)
    two = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch=2"]
    assert main(["train", "run/demo.yaml", *two]) == 2
    by, start = ("Slurm", "srun --nodes=1 --ntasks-per-node=2")
    if "RANK" in variables:
        by, start = ("torchrun", "torchrun --nnodes=1 --nproc-per-node=2")
    assert capsys.readouterr().err == (
        "longhaul: trainer.nodes x trainer.devices: found 1 x 2 = 2 ranks, wanted the 1 on 1 "
        f"node that {by} has started; or start them with {start}\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "devices", "nodes"),
    [
        (slurm(2), 1, 1),  # each would train the whole run
        (slurm(8, nodes=2), 8, 1),
        (slurm(8), 4, 2),
        (batch_script(2), 2, 1),  # nobody starts the second rank
        (torchrun(4), 2, 1),
        (torchrun(4, nodes=2), 4, 1),
        (salloc(8), 4, 1),
    ],
)
def test_other_ranks_than_the_configs_are_refused(
    variables: dict[str, str], devices: int, nodes: int, launch: Any
) -> None:
    launch(variables)
    with pytest.raises(ConfigError, match=f"found {nodes} x {devices} = .* that .* has started"):
        check_launched(config(devices, nodes).trainer)


@pytest.mark.parametrize(
    ("variables", "devices", "nodes"),
    [
        ({}, 2, 1),
        (slurm(1), 1, 1),
        (slurm(8, nodes=2), 4, 2),
        (batch_script(2), 1, 1),
        ({**slurm(1), **torchrun(2)}, 2, 1),  # torchrun as the one task of a job
        (salloc(2), 2, 1),
        # A shell, in which a user starts a run. SLURM_NTASKS is what salloc was asked for.
        ({**salloc(8), "SLURM_STEP_NUM_TASKS": "1"}, 2, 1),
        ({**jsrun(2), **by_hand()}, 2, 2),  # one a node
        ({"OMPI_COMM_WORLD_SIZE": "1"}, 2, 1),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 2, 1),  # a rank that Lightning has started
        ({name: x for name, x in batch_script(2).items() if "PER_NODE" not in name}, 1, 1),
    ],
)
def test_the_configs_ranks_are_not_refused(
    variables: dict[str, str], devices: int, nodes: int, launch: Any, gpus: Any
) -> None:
    gpus(0)
    launch(variables)
    check_launched(config(devices, nodes).trainer)
    trainer = _build_trainer(config(devices, nodes), [])
    assert (trainer.num_devices, trainer.world_size) == (devices, devices * nodes)
    assert {type(trainer.strategy).__name__} <= {"Single", "DDP"}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            jsrun(8),
            "JSM_NAMESPACE_SIZE: found 8 processes that jsrun has started, wanted",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE: found 2 processes that mpirun has"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE: found 2 processes that mpirun has"),
        (
            {**batch_script(8), "OMPI_COMM_WORLD_SIZE": "8"},
            "OMPI_COMM_WORLD_SIZE: found 8 processes that mpirun has",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "WORLD_SIZE: found 2 in the environment, wanted none",
        ),
        ({"WORLD_SIZE": "1", "PMI_SIZE": "two"}, "PMI_SIZE: found 'two' in the environment"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: found 'two' in the environment, wanted a number"),
        (
            {name: x for name, x in torchrun(1).items() if name != "GROUP_WORLD_SIZE"},
            "GROUP_WORLD_SIZE: found nothing in the environment, wanted a number",
        ),
    ],
)
def test_processes_whose_ranks_nobody_knows_are_refused(
    variables: dict[str, str], line: str, launch: Any
) -> None:
    launch(variables)
    with pytest.raises(ConfigError, match=line):
        check_launched(config(1).trainer)


def test_a_world_size_of_which_nobody_knows_the_rank_is_refused(launch: Any) -> None:
    launch({"WORLD_SIZE": "2", "RANK": "1"})
    with pytest.raises(ConfigError, match="WORLD_SIZE: found 2 in the environment, wanted none"):
        check_launched(config(2).trainer)


def test_nodes_without_a_rank_are_refused(launch: Any) -> None:
    launch({name: x for name, x in by_hand().items() if name != "NODE_RANK"})
    with pytest.raises(ConfigError, match=r"nodes: found 2 outside of a Slurm job, .*NODE_RANK"):
        check_launched(config(1, nodes=2).trainer)


def test_fewer_gpus_than_ranks_are_refused(gpus: Any) -> None:
    gpus(4)
    with pytest.raises(ConfigError, match="devices: found 8, wanted 4 at most: the GPUs"):
        rank_devices(config(8).trainer)
    assert [device.index for device in rank_devices(config(4).trainer)] == [0, 1, 2, 3]
    gpus(1)
    with pytest.raises(ConfigError, match="found 8, wanted 1 at most, with trainer"):
        rank_devices(config(8).trainer)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_slurm_task_that_sees_its_own_gpu_takes_that(
    strategy: str, gpus: Any, launch: Any
) -> None:
    gpus(1)
    launch(slurm(8, local=3))
    trainer = _build_trainer(config(8, 1, f"trainer.strategy={strategy}"), [])
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert (trainer.local_rank, trainer.global_rank, trainer.world_size) == (3, 3, 8)
    assert trainer.num_devices == 8


def test_ranks_on_cpus_need_no_gpu_even_where_there_is_one(gpus: Any) -> None:
    gpus(1)
    assert rank_devices(config(2, 1, "trainer.accelerator=cpu").trainer) == [
        torch.device("cpu"),
        torch.device("cpu"),
    ]


def test_a_papers_run_does_not_train_on_cpus_unless_it_is_asked_to(
    gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    monkeypatch.chdir(tmp_path)
    paper = "run/paper/softmax-256.yaml"
    one = ["trainer.devices=1", "trainer.strategy=single"]
    assert main(["train", paper, *one]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longhaul: trainer.accelerator: found gpu where torch ")
    for accelerator in ("cpu", "auto"):
        assert main(["train", paper, *one, f"trainer.accelerator={accelerator}"]) == 2
        assert "longhaul: data" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
