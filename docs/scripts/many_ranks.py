"""Measure what many ranks cost the first one, with light processes on one machine.

    python -P docs/scripts/many_ranks.py RANKS

The processes are forks of one that has imported torch. Each connects to the store, makes a group of
Gloo, exchanges the reports of updates and the headers of a checkpoint of 777 tensors a rank, and
sends heartbeats, as ranks of a run do. The table has the processor time, open files and private
memory of rank 0. The time that passes says nothing, because all ranks share this machine's cores.
Without a line for ::ffff:127.0.0.1 in /etc/hosts, torch looks its name up at each connection, which
may take minutes.
"""

import gc
import os
import pickle
import resource
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from longhaul.pipeline.checkpoints.integrity import Contents
from longhaul.pipeline.checkpoints.shards import Shard, merge
from longhaul.pipeline.checkpoints.together import gather_on_first
from longhaul.pipeline.distributed.watchdog import Watchdog

TENSORS = 777  # of a rank: of a model of 6.9B and its optimizer
REPORT = 13  # numbers
UPDATES = 10
HEARTBEATS_S = 10
LIMIT = timedelta(minutes=15)


class Table:
    """One row for each step of rank 0."""

    def __init__(self, rank: int) -> None:
        self._is_first = rank == 0
        if self._is_first:
            print("| step | processor time | open files | private memory |\n|---|---|---|---|")
        self._before = time.process_time()

    def row(self, step: str) -> None:
        if self._is_first:
            seconds, files = time.process_time() - self._before, len(os.listdir("/proc/self/fd"))
            with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
                kilobytes = sum(int(one.split()[1]) for one in lines if one.startswith("Private"))
            print(
                f"| {step} | {seconds:.2f} s | {files:,} | {kilobytes / 1e3:.0f} MB |", flush=True
            )
        self._before = time.process_time()


def be_rank(rank: int, ranks: int, port: int) -> None:
    table = Table(rank)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=LIMIT)
    # On GPUs the default group is NCCL's.
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    group = dist.new_group(backend="gloo", timeout=LIMIT)
    table.row("connected, with a group")
    watchdog = Watchdog(rank, ranks, LIMIT.total_seconds(), lambda: None)
    report = torch.zeros(REPORT, dtype=torch.float64)
    reports = report.new_empty(ranks, REPORT)

    def update() -> None:
        dist.gather(report, list(reports) if rank == 0 else None, group=group, group_dst=0)
        dist.broadcast(reports, group=group, group_src=0)

    update()
    table.row("first exchange of reports")
    for _ in range(UPDATES):
        update()
    table.row(f"{UPDATES} more, and heartbeats")
    names = (f"model/blocks.{number}.attention.qkv.weight" for number in range(TENSORS))
    here = {name: Shard(rank, "F32", (rank, 0), (1, 4096)) for name in names}
    of_ranks = gather_on_first(group, here)
    table.row("headers of a resume, gathered")
    if rank == 0:  # Not sent, since one machine has no room for the copies of all ranks.
        pickle.dumps(Contents([], merge(of_ranks)))
    table.row("the same, put together")
    time.sleep(HEARTBEATS_S)
    table.row(f"heartbeats of {HEARTBEATS_S} s")
    watchdog.stop()
    table.row("end")
    os._exit(0)  # forks must not run the parent's exit handlers


def main() -> None:
    ranks = int(sys.argv[1])
    os.setpgrp()  # the forks end with this process
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gc.freeze()  # a collection would copy the pages that the forks share
    for rank in range(ranks):
        if os.fork() == 0:
            be_rank(rank, ranks, port)
    for _ in range(ranks):
        if os.wait()[1]:
            os.killpg(0, signal.SIGKILL)


main()
