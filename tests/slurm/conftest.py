"""A real Slurm on loopback, and a run to submit to it.

The Slurm is munged, slurmctld and a slurmd a node, below a folder in /tmp. No systemd, no cgroups,
nothing in /etc changes. Each node has a UTS namespace: `hostname` is its name there, and its
processes are known by it, those of jobs too.
"""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.checkpoints.folders import newest_checkpoint
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint

LONGHAUL = [sys.executable, "-P", "-m", "longhaul.pipeline.cli"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "setpriv")
_PACKAGES = "slurmctld slurmd slurm-client munge"
# What Slurm's commands and jobs of another cluster would take from the environment of the tests.
_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

_CONFIG = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as a credential is valid: two minutes unless it is set.
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SlurmdTimeout=6
MessageTimeout=5
TCPTimeout=1
SlurmctldTimeout=15
ReturnToService=1
# Nodes may claim more than this machine has.
SlurmdParameters=config_overrides
"""


class Cluster:
    """Nodes node1, node2, ...; partition `debug`, and `urgent`, whose jobs preempt those of it.

    Commands and jobs run as root.
    """

    def __init__(
        self, *, nodes: int, cpus: int, gpus: int, gpu_type: str | None, extra: str
    ) -> None:
        # Below /tmp: a Unix socket's path has at most 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.nodes = tuple(f"node{index}" for index in range(1, nodes + 1))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        self.environment = kept | {
            "SLURM_CONF": str(self.root / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._namespaces: dict[str, int] = {}  # open, so that no other gets the same number
        self._configure(cpus, gpus, gpu_type, extra)
        try:
            (self.root / "munge.key").write_bytes(os.urandom(128))
            (self.root / "munge.key").chmod(0o600)
            # --force: munged refuses a socket in a folder that others cannot enter.
            self._begin("munged", "--foreground", "--force", *self._munge_options())
            self._until(lambda: (self.root / "munge.sock").exists(), 10, "munged is up")
            self._begin("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._begin_node(node)
            self._until(lambda: all(map(self._is_up, self.nodes)), 30, "all nodes are up")
        except BaseException:
            self.stop()
            raise

    def run(
        self, *command: str, check: bool = True, cwd: Path | None = None, seconds: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command outside of any job, for so long at most."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *arguments: str, cwd: Path | None = None) -> str:
        """`sbatch ARGUMENTS`; the job's id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, such as JobState, Restarts, ExitCode and StdOut."""
        line = self.run("scontrol", "show", "job", "-o", job_id).stdout.splitlines()[0]
        return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line.strip()))

    def wait(
        self, job_id: str, states: str | Collection[str], seconds: float = 60
    ) -> dict[str, str]:
        """Until the job is in one of the states; fails as soon as it has ended in another."""
        wanted = (states,) if isinstance(states, str) else states
        deadline = time.monotonic() + seconds
        while (job := self.job(job_id))["JobState"] not in wanted:
            is_hopeless = time.monotonic() > deadline or job["JobState"] in _OVER
            assert not is_hopeless, f"wanted {wanted}, found {job}\n{self.output(job_id)}"
            time.sleep(0.1)
        return job

    def output(self, job_id: str) -> str:
        """What a batch job has printed so far, both streams."""
        job = self.job(job_id)
        files = {Path(job[name]) for name in ("StdOut", "StdErr") if name in job}
        return "".join(file.read_text() for file in sorted(files) if file.exists())

    def down(self, node: str) -> None:
        """Take a node away as an administrator does: its jobs are requeued at once."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def resume(self, node: str) -> None:
        """Give a node that is down back."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self._until(lambda: self._is_up(node), 30, f"{node} is up")

    def processes(self, node: str) -> list[psutil.Process]:
        """slurmd, slurmstepds and tasks of a node."""
        if node not in self._namespaces:
            return []
        number = os.fstat(self._namespaces[node]).st_ino
        found = []
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/uts").st_ino == number:
                    found.append(process)
            except OSError:
                continue
        return found

    def crash(self, node: str) -> None:
        """Kill all processes of a node at once, as a power cut would; Slurm is not told."""
        while processes := self.processes(node):
            for process in processes:
                process.kill()
            self._daemons[node].wait()
            time.sleep(0.02)
        os.close(self._namespaces.pop(node))

    def start(self, node: str) -> None:
        """Start the slurmd of a node that crashed."""
        self._begin_node(node)
        self._until(lambda: self._is_up(node), 30, f"{node} is up")

    def clear(self) -> None:
        """End all jobs, and wait until they are gone."""
        self.run("scancel", "--user=root")
        self._until(lambda: not self.run("squeue", "-h").stdout, 30, "no job is left")

    def stop(self) -> None:
        """End everything that was started here, jobs too, and remove the folder."""
        for node in list(self._namespaces):
            self.crash(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.root)

    def _configure(self, cpus: int, gpus: int, gpu_type: str | None, extra: str) -> None:
        host = os.uname().nodename.split(".")[0]
        port = _free_ports(1 + len(self.nodes))
        lines = [_CONFIG.format(host=host, port=port, root=self.root)]
        gres = ""
        if gpus:
            for index in range(gpus):
                # A null device is as good as a GPU that nobody uses.
                os.mknod(self.root / f"gpu{index}", 0o20666, os.makedev(1, 3))
            kind = f" Type={gpu_type}" if gpu_type else ""
            line = f"Name=gpu{kind} File={self.root}/gpu[0-{gpus - 1}]\n"
            (self.root / "gres.conf").write_text(line)
            gres = f" Gres=gpu:{gpu_type}:{gpus}" if gpu_type else f" Gres=gpu:{gpus}"
            lines.append("GresTypes=gpu\n")
        for index, node in enumerate(self.nodes, start=1):
            lines.append(
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port + index} "
                f"CPUs={cpus} RealMemory=64000{gres} {extra} State=UNKNOWN\n"
            )
        lines.append(
            "PartitionName=debug Nodes=ALL Default=YES DefaultTime=01:00:00 MaxTime=INFINITE "
            "OverSubscribe=NO State=UP PriorityTier=1 GraceTime=30\n"
            "PartitionName=urgent Nodes=ALL DefaultTime=01:00:00 OverSubscribe=NO State=UP "
            "PriorityTier=2\n"
        )
        (self.root / "slurm.conf").write_text("".join(lines))
        hosts = [f"127.0.0.1 localhost {host}", *(f"127.0.0.1 {node}" for node in self.nodes)]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        for folder in ("state", "spool"):
            (self.root / folder).mkdir()

    def _munge_options(self) -> list[str]:
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed"}
        return [f"--{option}={self.root}/munge.{file}" for option, file in files.items()]

    def _begin(self, name: str, *command: str, node: str = "") -> None:
        with (self.root / "start.log").open("ab") as log:
            # In the foreground, and ended with this process however that ends.
            self._daemons[node or name] = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", name, *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _begin_node(self, node: str) -> None:
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'
        own = ("--uts", "--mount", "--propagation", "slave")
        names = (node, str(self.root / "hosts"))
        self._begin("unshare", *own, "sh", "-c", script, "_", *names, node=node)
        link = f"/proc/{self._daemons[node].pid}/ns/uts"
        self._until(lambda: not os.path.samefile(link, "/proc/self/ns/uts"), 10, "a namespace")
        self._namespaces[node] = os.open(link, os.O_RDONLY)

    def _is_up(self, node: str) -> bool:
        done = self.run("sinfo", "-h", "-p", "debug", "-n", node, "-o", "%T", check=False)
        return done.stdout.strip() in ("idle", "mixed", "allocated")

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                logs = sorted(self.root.glob("*.log"))
                tails = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs]
                raise TimeoutError("\n".join([f"not after {seconds} s: {what}", *tails]))
            time.sleep(0.05)


MakeCluster = Callable[..., Cluster]


def _free_ports(count: int) -> int:
    """The first of so many neighbours that nobody listens on, below those given out freely."""
    used = {one.laddr.port for one in psutil.net_connections("tcp") if one.status == "LISTEN"}
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        if used.isdisjoint(range(first, first + count)):
            return first


def _missing() -> str | None:
    """Why no Slurm can run here, None where one can."""
    if os.getuid() != 0:
        return "a Slurm of the tests' own needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends {_PACKAGES}"
    done = subprocess.run(("unshare", "--uts", "--mount", "true"), capture_output=True, text=True)
    return done.stderr.strip() or None


@pytest.fixture(scope="session")
def make_cluster() -> Iterator[MakeCluster]:
    """Clusters by their shape; tests that ask for the same shape share one.

    Keywords: nodes, cpus (a node), gpus (fake ones, a node), gpu_type, and extra, which is more
    of each node's line in slurm.conf, such as Feature=h100.
    """
    clusters: dict[str, Cluster] = {}

    def make(**shape: Any) -> Cluster:
        reason = _missing()
        if reason and os.environ.get("CI"):
            pytest.fail(reason)
        if reason:
            pytest.skip(reason)
        whole = {"nodes": 2, "cpus": 4, "gpus": 0, "gpu_type": None, "extra": ""} | shape
        key = repr(sorted(whole.items()))
        if key not in clusters:
            clusters[key] = Cluster(**whole)
        return clusters[key]

    yield make
    for cluster in clusters.values():
        cluster.stop()


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Iterator[Cluster]:
    """Two nodes of four CPUs, both up; jobs of a test end with it."""
    cluster = make_cluster()
    yield cluster
    cluster.clear()


NUM_UPDATES = 40
# Two nodes of two tasks each.
CONFIG = """
name: small
root: runs
model:
  layers: 2
  width: 32
  heads: 2
  vocabulary: 320
  attention: {{kind: conformal_sympow}}
data:
  manifest: {corpus}
  validation_manifest: {corpus}
  validation_tokens: 256
  context: 64
  workers: 0
optim:
  tokens_per_update: 512
trainer:
  max_tokens: {max_tokens}
  micro_batch: 2
  strategy: fsdp
  devices: 2
  nodes: 2
  stop_seconds: 20
checkpoint:
  every_tokens: 4096
tracking:
  uri: sqlite:///mlflow.db
  experiment: tests
slurm:
  cpus_per_task: 1
"""


@dataclass(frozen=True)
class Work:
    """A folder with small.yaml in it, and a cluster to submit to from there."""

    cluster: Cluster
    path: Path
    name: str = "small"

    def submit(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = [*LONGHAUL, "submit", "small.yaml", *arguments]
        return self.cluster.run(*command, cwd=self.path, check=check)

    def jobs(self, folder: str | None = None) -> list[str]:
        run = self.path / "runs" / (folder or self.name)
        lines = (run / "slurm" / "jobs.jsonl").read_text().splitlines()
        return [json.loads(line)["job_id"] for line in lines]

    def run(self, *arguments: str) -> str:
        """Submit, and wait for the end; the job's id."""
        self.submit(*arguments)
        (job,) = self.jobs()
        self.cluster.wait(job, "COMPLETED", 120)
        return job

    @property
    def folder(self) -> Path:
        return self.path / "runs" / self.name

    @property
    def step(self) -> int:
        """The last update that the journal knows."""
        journal = self.folder / "logs" / "metrics.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return max((e["step"] for e in map(json.loads, lines) if e["kind"] == "train"), default=0)

    def wait_for_step(self, job: str, step: int) -> None:
        deadline = time.monotonic() + 120
        while self.step < step:
            assert time.monotonic() < deadline, self.said(job)
            assert self.cluster.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING")
            time.sleep(0.05)

    def said(self, job: str) -> str:
        logs = sorted(self.folder.glob(f"logs/job-{job}*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = newest_checkpoint(self.folder / "checkpoints")
        assert newest is not None
        assert newest.name == f"step-{NUM_UPDATES:09d}"
        return SavedCheckpoint(newest, "model").read_group("model")

    def assert_one_clean_run(self) -> None:
        client = MlflowClient(f"sqlite:///{self.path}/mlflow.db")
        experiment = client.get_experiment_by_name("tests")
        assert experiment is not None
        (tracked,) = client.search_runs([experiment.experiment_id])
        assert tracked.info.status == "FINISHED", "\n".join(map(self.said, self.jobs()))
        history = client.get_metric_history(tracked.info.run_id, "curves/train_loss")
        assert sorted(point.step for point in history) == list(range(1, NUM_UPDATES + 1))


MakeWork = Callable[..., Work]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    text = Path(__file__).parents[2] / "modules"
    command = [*LONGHAUL, "prepare", "text", str(text), "shards"]
    options = ["--doc-tokens", "1024", "--docs-per-shard", "4", "--validation-fraction", "0"]
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)
    return folder / "shards" / "train"


@pytest.fixture(scope="module")
def make_work(
    make_cluster: Callable[..., Cluster], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeWork:
    def make(name: str = "work") -> Work:
        cluster = make_cluster()
        cluster.environment["OMP_NUM_THREADS"] = "1"
        path = tmp_path_factory.mktemp(name)
        text = CONFIG.format(corpus=shlex.quote(str(corpus)), max_tokens=512 * NUM_UPDATES)
        (path / "small.yaml").write_text(text)
        return Work(cluster, path)

    return make


@pytest.fixture
def work(make_work: MakeWork, cluster: Cluster) -> Work:
    return make_work()


# Found by every Python of a job, and only there does it do something.
FAULT = """
import sys
if "train" in sys.orig_argv:
    import os, time
    from longhaul.modules.pretraining import Pretraining
    original = Pretraining.manual_backward
    def manual_backward(self, loss):
        # Not from the garbage collector: while it lists a tuple that the thread that imports MLflow
        # still fills, that import fails.
        (requests,) = [x.requests for x in self.trainer.callbacks if hasattr(x, "requests")]
        if {when}:
            {what}
        original(self, loss)
    Pretraining.manual_backward = manual_backward
"""


@pytest.fixture
def fault(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes the tasks of jobs do something before a backward pass when something is so."""

    def inject(when: str, what: str) -> None:
        code = FAULT.format(when=when, what=what)
        monkeypatch.setitem(cluster.environment, "LONGHAUL_TEST_FAULT", code)

    return inject
