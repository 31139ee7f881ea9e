"""The bandwidth of all-reduces over gloo and NCCL."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # torch.distributed does not list them

from longhaul.pipeline.doctor.finding import Finding
from longhaul.pipeline.terminal.numbers import in_bytes

GLOO_FLOOR = 50e6
"""Below this many bytes per second gloo gets a warning; only CPU runs and bookkeeping use it."""
NCCL_FLOOR = 5e9
"""The same limit for NCCL: a single 100 Gb/s link gives 10 GB/s."""


_GLOO_BYTES = 8 << 20
_NCCL_BYTES = 256 << 20
_REPEATS = 3


def check_gloo() -> Finding:
    """gloo between two threads of this process: this machine's network to itself."""
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(gloo_rate, store, rank, 2) for rank in (0, 1)]
        return gloo_finding(min(rank.result() for rank in ranks), "of this machine with itself")


def gloo_rate(store: Store, rank: int, world_size: int, seconds: float = 20) -> float:
    """Bytes per second of an all-reduce; all ranks call this with the same store."""
    group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))
    tensor = torch.ones(_GLOO_BYTES // 4)
    reduce = group.allreduce  # type: ignore[attr-defined]
    return _all_reduce_rate(lambda: reduce([tensor]).wait(), [tensor], world_size)


def gloo_finding(rate: float, where: str) -> Finding:
    text = f"all-reduce {where}: {in_bytes(rate)}/s"
    if rate >= GLOO_FLOOR:
        return Finding("ok", "gloo", text)
    remedy = "GLOO_SOCKET_IFNAME names the network interface to use"
    return Finding("warning", "gloo", f"{text}, wanted {in_bytes(GLOO_FLOOR)}/s", remedy)


def check_local_nccl() -> Finding:
    """NCCL between the GPUs of this node."""
    from torch.cuda import nccl  # Not there in builds without CUDA.

    count = torch.cuda.device_count()
    if count == 1:
        return Finding("ok", "nccl", "one GPU, so no all-reduce inside the node")
    tensors = [torch.ones(_NCCL_BYTES // 4, device=f"cuda:{index}") for index in range(count)]
    rate = _all_reduce_rate(lambda: nccl.all_reduce(tensors), tensors, count)
    return nccl_finding(rate, f"of {count} GPUs in the node")


def nccl_rate(store: Store, rank: int, world_size: int, seconds: float = 120) -> float:
    """Bytes per second between the first GPUs of the nodes; all call this with the same store.

    The caller must stop waiting before `seconds`, after which NCCL's watchdog kills the process.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device,
    )
    tensor = torch.ones(_NCCL_BYTES // 4, device=device)
    rate = _all_reduce_rate(lambda: dist.all_reduce(tensor), [tensor], world_size)
    dist.destroy_process_group()
    return rate


def nccl_finding(rate: float, where: str) -> Finding:
    text = f"all-reduce {where}: {in_bytes(rate)}/s"
    if rate >= NCCL_FLOOR:
        return Finding("ok", "nccl", text)
    remedy = "NCCL_DEBUG=INFO shows which network NCCL uses, NCCL_SOCKET_IFNAME sets it"
    return Finding("warning", "nccl", f"{text}, wanted {in_bytes(NCCL_FLOOR)}/s", remedy)


def _all_reduce_rate(
    all_reduce: Callable[[], object], tensors: list[Tensor], world_size: int
) -> float:
    """Bytes that each rank sends per second, in the fastest of several all-reduces.

    Raises RuntimeError when a sum is wrong.
    """
    best = float("inf")
    for _ in range(1 + _REPEATS):  # the first one also connects
        for tensor in tensors:
            tensor.fill_(1)
        _synchronize(tensors)
        start = time.perf_counter()
        all_reduce()
        _synchronize(tensors)
        best = min(best, time.perf_counter() - start)
    for tensor in tensors:
        if not torch.all(tensor == world_size):
            raise RuntimeError(f"the sum of {world_size} ones is wrong on {tensor.device}")
    return 2 * (world_size - 1) / world_size * tensors[0].nbytes / best


def _synchronize(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
