"""The nodes of an allocation meet: who is there, with which code, and how fast they add up.

Every wait is bounded and every node is told apart by name, so that a node that is broken or absent
is what the log ends with, not a hang.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from longhaul.pipeline.doctor.bandwidth import (
    SECONDS_OF_GLOO,
    gloo_finding,
    gloo_rate,
    nccl_finding,
    nccl_rate,
)
from longhaul.pipeline.doctor.finding import SECONDS_OF_GPUS, Finding, find
from longhaul.pipeline.system.programs import output_of

SECONDS_TO_MEET = 180.0
"""How long the first node waits for the others, and they for it.

Their checks may take as much longer than its own where GPUs are cold and files come slowly.
"""


@dataclass(frozen=True)
class Place:
    """Where this process stands in a job step with one task a node, or with more, of a node."""

    job: str
    node: int
    names: tuple[str, ...]
    is_first_task: bool

    @property
    def name(self) -> str:
        return self.names[self.node]

    @property
    def port(self) -> int:
        # Below what the system gives out, and what Lightning takes (15000 and up).
        return 11_000 + int(self.job) % 4_000


def place() -> Place | None:
    """The place that Slurm's variables tell, None outside of a job step."""
    environment = os.environ
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None
    nodes = environment["SLURM_STEP_NODELIST"]
    names = output_of("scontrol", "show", "hostnames", nodes)
    if names is None:
        raise RuntimeError(f"scontrol show hostnames {nodes} fails, wanted the nodes' names")
    return Place(
        job=environment["SLURM_JOB_ID"],
        node=int(environment["SLURM_NODEID"]),
        names=tuple(names.split()),
        is_first_task=environment["SLURM_LOCALID"] == "0",
    )


def meet(
    here: Place, mine: Mapping[str, Any], tell: Callable[[Sequence[Finding]], None]
) -> Sequence[Finding]:
    """Tell the others of this node, and find how they are together; the first node speaks for all.

    Args:
        mine: of this node: `commit`, None where it is not known; `gpus`, how many; `failures`, what
            failed of its machine; `unless_shared`, what did unless it fails on all nodes.
        tell: is given what was found before any node leaves: srun may end all when one does.
    """
    try:
        store = _open_store(here)
        store.set(f"node/{here.node}", json.dumps(mine))
        present = _present(store, here)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        text = f"{here.names[0]}, the first node, cannot be met at port {here.port}: {reason}"
        found = [Finding("FAILURE", "nodes", text, f"sbatch --exclude={here.names[0]}")]
        tell(found)
        return found
    reports = {here.names[node]: json.loads(store.get(f"node/{node}")) for node in present}
    absent = [name for name in here.names if name not in reports]
    # All find the same, so that they end with the same status; one tells it.
    shared = list(_together(here, reports, absent))
    own: list[Finding] = []
    if not absent:
        own = list(_add_up(store, here, all(report["gpus"] for report in reports.values())))
    tell([*shared, *own] if here.node == 0 else own)
    store.set(f"told/{here.node}", "")
    try:
        _wait_for(store, [f"told/{node}" for node in present], SECONDS_OF_GPUS)
        # The first node's store ends with its process, so it leaves last.
        store.set(f"left/{here.node}", "")
        if here.node == 0:
            _wait_for(store, [f"left/{node}" for node in present], 5)
    except RuntimeError:
        pass  # It left before: all is said.
    return [*shared, *own]


def _open_store(here: Place) -> Store:
    """The first node's store, as soon as it is there."""
    deadline = time.monotonic() + SECONDS_TO_MEET
    while here.node > 0:
        # torch's own waiting takes twice its limit and prints a page.
        try:
            socket.create_connection((here.names[0], here.port), timeout=5).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    return TCPStore(
        here.names[0],
        here.port,
        is_master=here.node == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=SECONDS_TO_MEET),
    )


def _present(store: Store, here: Place) -> list[int]:
    """The nodes that came in time, as the first node saw it."""
    if here.node == 0:
        keys = [f"node/{node}" for node in range(len(here.names))]
        present = [keys.index(key) for key in _wait_for(store, keys, SECONDS_TO_MEET)]
        store.set("present", json.dumps(present))
    else:
        store.wait(["present"], timedelta(seconds=SECONDS_TO_MEET + 5))
    found: list[int] = json.loads(store.get("present"))
    return found


def _wait_for(store: Store, keys: list[str], seconds: float) -> list[str]:
    """Those of the keys that are there in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = [key for key in keys if store.check([key])]
        if len(found) == len(keys) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _together(
    here: Place, reports: Mapping[str, Mapping[str, Any]], absent: list[str]
) -> Iterator[Finding]:
    """What the nodes' reports say: who is absent, who is bad, who has other code."""
    if absent:
        text = f"{', '.join(absent)} did not come in {SECONDS_TO_MEET:.0f} s"
        yield Finding("FAILURE", "nodes", text, f"sbatch --exclude={','.join(absent)}")
    on_all = set.intersection(*(set(report["unless_shared"]) for report in reports.values()))
    bad = {}
    for name, report in reports.items():
        own = [what for what in report["unless_shared"] if what not in on_all]
        if failures := [*report["failures"], *own]:
            bad[name] = ", ".join(failures)
    if bad:
        text = "; ".join(f"{name}: {failures}" for name, failures in bad.items())
        yield Finding("FAILURE", "nodes", f"bad are {text}", f"sbatch --exclude={','.join(bad)}")
    if not absent and not bad:
        yield Finding("ok", "nodes", f"all {len(here.names)} are here: {', '.join(here.names)}")
    commits = {name: report["commit"] for name, report in reports.items() if report["commit"]}
    if len(set(commits.values())) > 1:
        common = Counter(commits.values()).most_common(1)[0][0]
        odd = [f"{name} has {commit}" for name, commit in commits.items() if commit != common]
        text = f"{', '.join(odd)}, the others {common}"
        yield Finding("FAILURE", "commits", text, "install the same commit on all nodes")


def _add_up(store: Store, here: Place, has_gpus: bool) -> Iterator[Finding]:
    count = len(here.names)

    def gloo() -> Finding:
        rate = gloo_rate(PrefixStore("gloo", store), here.node, count)
        return gloo_finding(rate, f"of {count} nodes")

    def nccl() -> Finding:
        rate = nccl_rate(PrefixStore("nccl", store), here.node, count)
        return nccl_finding(rate, f"of {count} nodes, one GPU each")

    found = [find("gloo", gloo, SECONDS_OF_GLOO)]
    if has_gpus:
        found.append(find("nccl", nccl, SECONDS_OF_GPUS, if_late="FAILURE"))
    # All measure the same; a failure each node tells for itself.
    yield from (one for one in found if here.node == 0 or one.status == "FAILURE")
