"""`longhaul doctor` in a job of two nodes: each is heard, and who is bad or absent is named."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_CODE = """
import os, sys
from longhaul.pipeline.doctor import machine_checks, nodes, run_checks
from longhaul.pipeline.cli import main
node = os.uname().nodename
{change}
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def _doctor(
    cluster: Any, *arguments: str, change: str = "", options: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    """One task on each node; `change` is Python that runs before, and knows its `node`."""
    python = (sys.executable, "-P", "-c", _CODE.format(change=change), *arguments)
    step = ("srun", "--nodes=2", "--ntasks-per-node=1", *options)
    done: subprocess.CompletedProcess[str] = cluster.run(*step, *python, check=False, seconds=90)
    return done


def _failures(output: str) -> list[str]:
    """Node and subject of each failure, by node: srun forwards the nodes' lines in any order."""
    words = [line.split() for line in output.splitlines()]
    return sorted(f"{word[0]} {word[2]}" for word in words if word[1] == "FAILURE")


def test_both_nodes_are_heard_and_add_up(cluster: Any) -> None:
    done = _doctor(cluster)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for node in ("node1", "node2"):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{node}: ")]
        assert {line.split()[2] for line in lines} >= {"torch", "gpu", "disk", "gloo", "time"}
    assert "all 2 are present: node1, node2" in done.stdout
    assert "node1: ok       gloo      all-reduce of 2 nodes: " in done.stdout


@pytest.mark.wide
def test_what_fails_comes_first_and_the_job_is_measured_against_the_run(cluster: Any) -> None:
    done = _doctor(cluster, "run/demo.yaml", "data.manifest=/nowhere", options=("--time=1",))
    assert done.returncode == 2, f"{done.stdout}\n{done.stderr}"
    assert _failures(done.stdout) == [
        f"{node}: {what}" for node in ("node1", "node2") for what in ("shape", "shards")
    ]
    lines = [line for line in done.stdout.splitlines() if line.startswith("node2: ")]
    order = [("FAILURE", "warning", "ok").index(line.split()[1]) for line in lines]
    assert order == sorted(order)
    assert any(line.startswith("node2: warning  time") for line in lines)


@pytest.mark.wide
def test_a_node_that_cannot_write_is_named(cluster: Any) -> None:
    # Where the first node to fail ends the others, its status may be that of one that was ended.
    options = ("--kill-on-bad-exit=1",)
    done = _doctor(cluster, change="if node == 'node2': os.chdir('/proc')", options=options)
    assert done.returncode in (69, 143), f"{done.stdout}\n{done.stderr}"
    assert _failures(done.stdout) == ["node1: nodes", "node2: disk"]
    assert "bad nodes: node2: disk; sbatch --exclude=node2" in done.stdout


@pytest.mark.soak
def test_a_node_without_the_data_is_a_bad_node(cluster: Any, corpus: Path) -> None:
    change = """
corpus_of = run_checks.corpus_of
def corpus_of_a_node(data, key):
    if node == 'node2':
        raise FileNotFoundError(f"{data.manifest}: no such manifest")
    return corpus_of(data, key)
run_checks.corpus_of = corpus_of_a_node
"""
    both = ("trainer.nodes=2", "trainer.strategy=fsdp", "data.validation_manifest=null")
    done = _doctor(cluster, "run/demo.yaml", *both, f"data.manifest={corpus}", change=change)
    assert done.returncode == 69, f"{done.stdout}\n{done.stderr}"
    assert _failures(done.stdout) == ["node1: nodes", "node2: shards"]
    assert "bad nodes: node2: shards; sbatch --exclude=node2" in done.stdout


@pytest.mark.soak
def test_a_node_whose_git_is_slow_is_no_node_with_other_code(cluster: Any) -> None:
    change = "if node == 'node2': machine_checks.source_commit = lambda: None"
    done = _doctor(cluster, change=f"{change}\nmachine_checks.source_checkout = lambda: '/'")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "node2: warning  commit    git gives no answer" in done.stdout


@pytest.mark.soak
def test_a_step_of_one_node_tells_of_the_others(cluster: Any) -> None:
    # As `srun --pty`, and salloc with use_interactive_step, have it.
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1")
    both = ("trainer.nodes=2", "trainer.strategy=fsdp")
    command = ["salloc", "--nodes=2", *step, sys.executable, "-P", "-c", _CODE.format(change="")]
    done = cluster.run(*command, "run/demo.yaml", *both, check=False, seconds=90)
    assert "only 1 of the allocation's 2 nodes were checked; srun --overlap" in done.stdout
    assert "2 nodes, as trainer.nodes says" in done.stdout, done.stderr


@pytest.mark.soak
def test_a_node_with_other_code_is_named(cluster: Any) -> None:
    done = _doctor(cluster, change="machine_checks.source_commit = lambda: f'commit-of-{node}'")
    assert done.returncode == 69, f"{done.stdout}\n{done.stderr}"
    assert _failures(done.stdout) == ["node1: commits"]
    assert "node2 has commit-of-node2, the others commit-of-node1" in done.stdout


@pytest.mark.wide
def test_an_absent_node_is_named_in_time(cluster: Any) -> None:
    for absent, present in (("node2", "node1"), ("node1", "node2")):
        bound = "nodes.MEET_S = 4"
        change = f"{bound}\nif node == {absent!r}: sys.exit(0)"
        done = _doctor(cluster, change=change)
        assert done.returncode == 69, f"{done.stdout}\n{done.stderr}"
        assert _failures(done.stdout) == [f"{present}: nodes"]
        assert f"sbatch --exclude={absent}" in done.stdout


@pytest.mark.wide
def test_without_srun_one_node_is_checked_and_the_rest_are_told_of(
    cluster: Any, tmp_path: Path
) -> None:
    command = shlex.join((sys.executable, "-P", "-c", _CODE.format(change="")))
    job = cluster.submit("--nodes=2", f"--output={tmp_path}/out", f"--wrap={command}")
    cluster.wait(job, "COMPLETED")
    output = cluster.output(job)
    assert "only 1 of the allocation's 2 nodes were checked; srun --overlap --nodes=2 " in output
    assert "\nok       time " in output
