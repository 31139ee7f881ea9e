"""What a run's ranks run on, devices and processes, and for how long they are connected."""

import faulthandler
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import distributed_c10d

from longhaul.configs import ConfigError
from longhaul.configs.schema import TrainerConfig
from longhaul.pipeline.system.devices import uses_gpu
from longhaul.pipeline.system.waiting import COLLECTIVE_S, DISCONNECT_S

# Where each launcher tells its processes how many they are.
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
}


class _Launched(NamedTuple):
    """The processes that a launcher has started: this one, and others like it."""

    by: str
    nodes: int
    ranks: int
    command: str  # that would start what the config asks for


def check_launched(config: TrainerConfig) -> None:
    """Refuse another number of processes than the config's ranks.

    Each would take its share of the samples as one of the config's ranks. Those of missing ranks
    would not be trained on, or a rank would wait for them.

    Raises:
        ConfigError: naming both numbers; or several nodes have no means to find each other.
    """
    launched = _launched(config)
    if not (TorchElasticEnvironment.detect() or _is_step()):
        _check_other_launchers(config)
    if launched is None:
        by_hand = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
        if config.nodes > 1 and not by_hand <= os.environ.keys():
            raise ConfigError(
                f"trainer.nodes: found {config.nodes} outside of a Slurm job, wanted 1, or "
                "MASTER_ADDR, MASTER_PORT and NODE_RANK in each node's environment"
            )
        return
    if (launched.nodes, launched.ranks) != (config.nodes, config.world_size):
        raise ConfigError(
            f"trainer.nodes x trainer.devices: found {config.nodes} x {config.devices} = "
            f"{config.world_size} ranks, wanted the {launched.ranks} on {launched.nodes} "
            f"node{'s' if launched.nodes > 1 else ''} that {launched.by} has started; or start "
            f"them with {launched.command}"
        )


def _check_other_launchers(config: TrainerConfig) -> None:
    """Refuse more processes than one a node, started by launchers whose ranks are not read."""
    for size, launcher in _OTHER_LAUNCHERS.items():
        if size in os.environ and _number(size) > config.nodes:
            raise ConfigError(
                f"{size}: found {_number(size)} processes that {launcher} has started, wanted one "
                "a node, which starts the other ranks; or srun or torchrun"
            )
    world_size = _number("WORLD_SIZE", missing="1")
    # Lightning sets both for the ranks that it starts.
    is_rank = world_size == config.world_size and "LOCAL_RANK" in os.environ
    if world_size != 1 and not is_rank:
        raise ConfigError(
            f"WORLD_SIZE: found {world_size} in the environment, wanted none, as longhaul starts "
            "the ranks of a machine; or srun or torchrun"
        )


def _launched(config: TrainerConfig) -> _Launched | None:
    """None where a user has started this process, which starts the other ranks of its machine."""
    if TorchElasticEnvironment.detect():
        return _Launched(
            "torchrun",
            nodes=_number("GROUP_WORLD_SIZE"),
            ranks=_number("WORLD_SIZE"),
            command=f"torchrun --nnodes={config.nodes} --nproc-per-node={config.devices}",
        )
    if not _is_in_slurm():
        return None
    # A batch script is one process outside of any step, however many tasks its job has.
    return _Launched(
        "Slurm",
        nodes=_nodes_of_step(config) if _is_step() else 1,
        ranks=_number("SLURM_NTASKS") if _is_step() else 1,
        command=f"srun --nodes={config.nodes} --ntasks-per-node={config.devices}",
    )


def _is_in_slurm() -> bool:
    """Whether Slurm has started this process as one of a job's ranks, or in a batch script.

    Lightning takes a job named bash or interactive, as salloc names it, for a shell in which a user
    types. It would start all ranks from each of several tasks there.
    """
    is_task = "SLURM_STEP_NUM_TASKS" in os.environ and _number("SLURM_STEP_NUM_TASKS") > 1
    return is_task or SLURMEnvironment.detect()


def _is_step() -> bool:
    return "SLURM_STEP_ID" in os.environ


def _nodes_of_step(config: TrainerConfig) -> int:
    # Where `srun` takes a part of an allocation, SLURM_NNODES may still be the allocation's.
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if name in os.environ:
            return _number(name)
    return config.nodes


def _number(name: str, missing: str | None = None) -> int:
    """A launcher's environment variable."""
    value = os.environ.get(name, missing)
    if value is None or not value.isdecimal():
        found = "nothing" if value is None else repr(value)
        raise ConfigError(f"{name}: found {found} in the environment, wanted a number")
    return int(value)


def cluster_environment() -> ClusterEnvironment:
    """Tells Lightning the rank of this process.

    Lightning alone would also find other launchers, and train on as many ranks as they have
    started, which nothing compares with the config's.
    """
    # Within a Slurm job too, ranks that torchrun has started are torchrun's.
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    # Of a batch script Lightning would take the job's tasks for ranks.
    if _is_in_slurm() and _is_step():
        # Lightning's auto-requeue would save and requeue inside the signal handler.
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def rank_devices(config: TrainerConfig) -> list[torch.device]:
    """The device of each rank of this machine, by local rank.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or none and the config asks for them.
    """
    if not uses_gpu(config.accelerator):
        return [torch.device("cpu")] * config.devices
    visible = torch.cuda.device_count()
    # Slurm can be asked to show each task a GPU of its own only, which is the first that it sees.
    if visible == 1 and isinstance(cluster_environment(), SLURMEnvironment):
        return [torch.device("cuda", 0)] * config.devices
    if visible < config.devices:
        single = ", with trainer.strategy single" if visible == 1 else ""
        raise ConfigError(
            f"trainer.devices: found {config.devices}, wanted {visible} at most{single}: the GPUs "
            "that are visible on this machine"
        )
    return [torch.device("cuda", index) for index in range(config.devices)]


def collective_timeout(config: TrainerConfig) -> timedelta:
    """After which a collective fails by itself: after the watchdog has said which rank hangs."""
    return timedelta(seconds=config.hang_seconds + COLLECTIVE_S)


def limit_collectives(timeout: timedelta) -> None:
    """Set the timeout of all process groups that this rank is in.

    Device meshes and DeepSpeed make groups without a timeout, and NCCL's own is ten minutes.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def disconnect_ranks() -> None:
    """Close the connections between the ranks, which have no collective in progress any more.

    With NCCL each waits for the others of its machine, so a rank that died just now would be waited
    for without end, and nothing else watches any more: this process then ends with status 1.
    """
    if not dist.is_initialized():
        return
    faulthandler.dump_traceback_later(DISCONNECT_S, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
