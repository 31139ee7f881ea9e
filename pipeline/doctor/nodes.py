"""Checks of an allocation's nodes together: which are present, whether all have one commit, and how
fast their all-reduces are.

Every wait has a time limit and every message names its node, so that the log ends with the name of
a broken or absent node, and not with a hang.
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
    gloo_finding,
    gloo_rate,
    nccl_finding,
    nccl_rate,
)
from longhaul.pipeline.doctor.finding import Finding, run_check
from longhaul.pipeline.system.programs import output_of
from longhaul.pipeline.system.waiting import GLOO_CHECK_S, GPU_CHECK_S, MEET_S, POLL_S


@dataclass(frozen=True)
class JobTask:
    """Which task of which node this process is, in a job step with one or more tasks per node."""

    job: str
    node: int
    names: tuple[str, ...]
    is_first_task: bool

    @property
    def name(self) -> str:
        return self.names[self.node]

    @property
    def port(self) -> int:
        # Below the ports that the system hands out, and those that Lightning uses (15000 and up).
        return 11_000 + int(self.job) % 4_000


def find_job_task() -> JobTask | None:
    """This process's place by Slurm's environment variables; None outside of a job step."""
    environment = os.environ
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None
    nodes = environment["SLURM_STEP_NODELIST"]
    names = output_of("scontrol", "show", "hostnames", nodes)
    if names is None:
        raise RuntimeError(
            f"scontrol show hostnames {nodes}: found a failure, wanted the nodes' names"
        )
    return JobTask(
        job=environment["SLURM_JOB_ID"],
        node=int(environment["SLURM_NODEID"]),
        names=tuple(names.split()),
        is_first_task=environment["SLURM_LOCALID"] == "0",
    )


def meet_other_nodes(
    here: JobTask, own_report: Mapping[str, Any], show: Callable[[Sequence[Finding]], None]
) -> Sequence[Finding]:
    """Exchange reports with the other nodes, and check all of them together.

    The first node shows the common findings.

    Args:
        here: this node.
        own_report: about this node: `commit`, None if unknown; `gpus`, how many; `failures`, the
            checks whose failure is its machine's; `unless_shared`, the checks whose failure is its
            machine's unless all nodes have it.
        show: called with the findings before any node exits, because srun may end all tasks when
            one exits.
    """
    try:
        store = _open_store(here)
        store.set(f"node/{here.node}", json.dumps(own_report))
        present = _present_nodes(store, here)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        text = f"{here.names[0]}, the first node, cannot be reached at port {here.port}: {reason}"
        findings = [Finding("FAILURE", "nodes", text, f"sbatch --exclude={here.names[0]}")]
        show(findings)
        return findings
    reports = {here.names[node]: json.loads(store.get(f"node/{node}")) for node in present}
    absent = [name for name in here.names if name not in reports]
    # All nodes find the same, so that they exit with the same status; the first one shows it.
    shared = list(_findings_from_reports(here, reports, absent))
    own: list[Finding] = []
    if not absent:
        own = list(
            _all_reduce_findings(store, here, all(report["gpus"] for report in reports.values()))
        )
    show([*shared, *own] if here.node == 0 else own)
    store.set(f"shown/{here.node}", "")
    try:
        _wait_for(store, [f"shown/{node}" for node in present], GPU_CHECK_S)
        # The store ends with the first node's process, so that node exits last.
        store.set(f"left/{here.node}", "")
        if here.node == 0:
            _wait_for(store, [f"left/{node}" for node in present], 5)
    except RuntimeError:
        pass  # The first node has exited already: everything has been shown.
    return [*shared, *own]


def _open_store(here: JobTask) -> Store:
    """The store on the first node, once that node has opened it."""
    deadline = time.monotonic() + MEET_S
    while here.node > 0:
        # torch's own wait takes twice its time limit and prints a page.
        try:
            socket.create_connection((here.names[0], here.port), timeout=5).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
    return TCPStore(
        here.names[0],
        here.port,
        is_master=here.node == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_S),
    )


def _present_nodes(store: Store, here: JobTask) -> list[int]:
    """The nodes that reported in time, as the first node saw it."""
    if here.node == 0:
        keys = [f"node/{node}" for node in range(len(here.names))]
        present = [keys.index(key) for key in _wait_for(store, keys, MEET_S)]
        store.set("present", json.dumps(present))
    else:
        store.wait(["present"], timedelta(seconds=MEET_S + 5))
    nodes: list[int] = json.loads(store.get("present"))
    return nodes


def _wait_for(store: Store, keys: list[str], seconds: float) -> list[str]:
    """The keys that are set within the time limit."""
    deadline = time.monotonic() + seconds
    while True:
        present = [key for key in keys if store.check([key])]
        if len(present) == len(keys) or time.monotonic() > deadline:
            return present
        time.sleep(0.05)


def _findings_from_reports(
    here: JobTask, reports: Mapping[str, Mapping[str, Any]], absent: list[str]
) -> Iterator[Finding]:
    """Which nodes are absent, bad, or on another commit, according to the nodes' reports."""
    if absent:
        text = f"{', '.join(absent)} did not report within {MEET_S:.0f} s"
        yield Finding("FAILURE", "nodes", text, f"sbatch --exclude={','.join(absent)}")
    on_all = set.intersection(*(set(report["unless_shared"]) for report in reports.values()))
    bad = {}
    for name, report in reports.items():
        own = [what for what in report["unless_shared"] if what not in on_all]
        if failures := [*report["failures"], *own]:
            bad[name] = ", ".join(failures)
    if bad:
        text = "; ".join(f"{name}: {failures}" for name, failures in bad.items())
        yield Finding("FAILURE", "nodes", f"bad nodes: {text}", f"sbatch --exclude={','.join(bad)}")
    if not absent and not bad:
        yield Finding("ok", "nodes", f"all {len(here.names)} are present: {', '.join(here.names)}")
    commits = {name: report["commit"] for name, report in reports.items() if report["commit"]}
    if len(set(commits.values())) > 1:
        common = Counter(commits.values()).most_common(1)[0][0]
        odd = [f"{name} has {commit}" for name, commit in commits.items() if commit != common]
        text = f"{', '.join(odd)}, the others {common}"
        yield Finding("FAILURE", "commits", text, "install the same commit on all nodes")


def _all_reduce_findings(store: Store, here: JobTask, has_gpus: bool) -> Iterator[Finding]:
    count = len(here.names)

    def gloo() -> Finding:
        rate = gloo_rate(PrefixStore("gloo", store), here.node, count)
        return gloo_finding(rate, f"of {count} nodes")

    def nccl() -> Finding:
        rate = nccl_rate(PrefixStore("nccl", store), here.node, count)
        return nccl_finding(rate, f"of {count} nodes, one GPU each")

    findings = [run_check("gloo", gloo, GLOO_CHECK_S)]
    if has_gpus:
        findings.append(run_check("nccl", nccl, GPU_CHECK_S, if_timed_out="FAILURE"))
    # All nodes measure the same rate, but each node shows its own failure.
    yield from (one for one in findings if here.node == 0 or one.status == "FAILURE")
