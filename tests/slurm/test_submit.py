"""What `longhaul submit` asks a real Slurm for, and what it refuses to ask."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from longhaul.pipeline.cli import main
from longhaul.pipeline.cluster import submission

Cluster = Any  # conftest.Cluster: modules of tests cannot import each other
Work = Any

CHECKOUT = Path(__file__).parent.parent.parent
ONE_TASK = ["trainer.nodes=1", "trainer.devices=1", "trainer.strategy=single"]


def on(corpus: Path) -> list[str]:
    """Overrides with which a preset reads these shards."""
    return [f"data.manifest={corpus}", "data.validation_manifest=null"]


DryRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> DryRun:
    """The status, stdout and stderr of a dry run with these arguments, which leaves nothing."""

    def submit(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        status = main(["submit", "run/demo.yaml", "--dry-run", *on(corpus), *arguments])
        assert not list(tmp_path.iterdir())
        return status, *capsys.readouterr()

    return submit


NASTY = "a b;c\"d'e$(touch pwned)`touch pwned`#f&h|i*"


@pytest.mark.wide
def test_a_signalled_job_of_any_name_resumes_and_is_evaluated(
    make_work: Callable[..., Work], cluster: Cluster, fault: Callable[[str, str], None]
) -> None:
    """The shell runs no part of a name, and the evaluation waits for the second start's end."""
    work = dataclasses.replace(make_work("a $(touch pwned) 'b"), name=NASTY)
    # The first start waits within a backward pass for the signal.
    fault(
        "self.progress.step == 5 and 'SLURM_RESTART_COUNT' not in os.environ",
        """
            while not requests.has_signal:
                time.sleep(0.05)""",
    )
    one_task_per_node = ["trainer.devices=1", "trainer.micro_batch=4", "trainer.strategy=ddp"]
    options = ["slurm.account=x y", "slurm.then=[evaluate]"]
    work.submit(f"name={json.dumps(NASTY)}", *one_task_per_node, *options)
    job, after = work.jobs()
    work.wait_for_step(job, 5)
    cluster.run("scancel", "--signal=USR1", job)
    ended = cluster.wait(job, "COMPLETED", 120)
    assert (ended["JobName"], ended["Account"], ended["Restarts"]) == (NASTY, "x y", "1")
    log = (work.folder / "logs" / f"job-{job}.log").read_text()
    assert "train ended with status 75" in log
    assert "steps 6 to 40" in log
    work.assert_one_clean_run()
    cluster.wait(after, "COMPLETED", 120)
    assert list((work.folder / "evaluation").glob("*/results.json"))
    assert not list(work.path.rglob("pwned*"))
    assert {path.name for path in work.path.iterdir()} == {
        *("small.yaml", "runs", "mlflow.db", "mlruns")
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (['name="a%jb"'], "wanted a folder without % and"),
        (["name='a\\b'"], "wanted a folder without % and"),
        (['slurm.account="a\\ntouch b"'], "wanted printable characters only"),
        (["slurm.time=720"], "slurm.time: found the number 720, wanted days too"),
        (
            ["slurm.time=0-00:01"],
            "slurm.time: found 0-00:01, wanted more than 240 s: the signal to",
        ),
        (["--sweep", "slurm.time=0-1,0-2"], "--time=0-1 and --time=0-2, wanted runs that ask"),
        (["--sweep", "trainer.seed=1,1"], "found two runs 'demo-seed=1', wanted names that differ"),
        (["--sweep", "trainer.seed"], "found 'trainer.seed', wanted key.sub=A,B"),
        (["--chain", "-1"], "--chain: found -1, wanted 0 or more"),
        (["trainer.accelerator=gpu"], "slurm.gpu: found null with trainer.accelerator gpu, wanted"),
    ],
)
def test_what_cannot_be_queued_is_refused(
    arguments: list[str], words: str, dry_run: DryRun
) -> None:
    status, output, error = dry_run(*arguments)
    assert (status, output) == (2, "")
    assert words in error


def test_a_dry_run_prints_the_script(dry_run: DryRun) -> None:
    status, script, _ = dry_run("name=010", "slurm.time=12:00:00")
    assert status == 0
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=010\n")
    assert "#SBATCH --time=12:00:00\n" in script
    status, script, _ = dry_run("--sweep", "optim.learning_rate=0.001,0.01")
    assert status == 0
    assert "#SBATCH --array=0-1%4\n" in script
    for rate in ("0.001", "0.01"):
        assert f"/runs/demo-learning_rate={rate}/slurm/train.sbatch" in script


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ([], None),
        (["slurm.gpu=any"], "8"),
        (["slurm.gpu=any", "slurm.cpus_per_task=3"], "3"),
        (["slurm.gpu=any", "slurm.extra=[--cpus-per-gpu=12]"], None),
        (["slurm.extra=['--gres=gpu:1']", "trainer.accelerator=gpu"], None),
    ],
)
def test_a_rank_with_a_gpu_gets_more_than_one_cpu(
    options: list[str], cpus: str | None, dry_run: DryRun
) -> None:
    status, script, _ = dry_run(*options)
    assert status == 0
    lines = script.splitlines()
    asked = [line.partition("=")[2] for line in lines if "--cpus-per-task=" in line]
    assert [one for one in asked if one.isdigit()] == ([] if cpus is None else [cpus])


def replace_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Work in a folder, with a shell script in the place of sbatch."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/sh\n{does}\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.chdir(folder)


def test_a_submission_that_sbatch_refuses_leaves_no_run_folder(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_sbatch(tmp_path, monkeypatch, "echo 'invalid partition' >&2; exit 1")
    for arguments in (["name=one"], ["name=two", "--sweep", "trainer.seed=1,2"]):
        assert main(["submit", "run/demo.yaml", *on(corpus), *arguments]) == 1
        assert "invalid partition" in capsys.readouterr().err
    # The folder of the sweep stays: it names the parent run that MLflow has by now.
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two-sweep"]
    # What was there before stays.
    note = tmp_path / "runs" / "three" / "slurm" / "jobs.jsonl"
    note.parent.mkdir(parents=True)
    note.touch()
    assert main(["submit", "run/demo.yaml", *on(corpus), "name=three"]) == 1
    assert list(note.parent.iterdir()) == [note]


def test_the_files_of_a_job_that_may_be_queued_are_kept(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    does = "case $* in *one*) echo queued;; *late*) exec sleep 60;; *) kill -INT $PPID; esac"
    replace_sbatch(tmp_path, monkeypatch, does)
    monkeypatch.setattr(submission, "QUEUE_S", 1.0)
    submit = ["submit", "run/demo.yaml", *on(corpus)]
    # A shell starts what runs in the background with SIGINT ignored, and so perhaps these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for status, arguments in (
        (1, ["name=one"]),
        (1, ["name=one", "--sweep", "trainer.seed=1"]),
        (130, ["name=two"]),
        (1, ["name=late"]),
    ):
        assert main([*submit, *arguments]) == status
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "longhaul: sbatch: found no answer in 1 s, wanted a job id; the job may be queued, as "
        "squeue --me tells"
    )
    for name in ("one", "one-seed=1", "two", "late"):
        files = sorted(path.name for path in (tmp_path / "runs" / name / "slurm").iterdir())
        assert files == ["config.yaml", "train.sbatch"], name


@pytest.mark.wide
def test_a_sweep_is_one_array_of_runs_below_a_parent(
    work: Work, cluster: Cluster, fault: Callable[[str, str], None]
) -> None:
    # One of them is asked to stop, and comes back alone.
    first = "os.environ['SLURM_ARRAY_TASK_ID'] + os.environ.get('SLURM_RESTART_COUNT', '0') == '00'"
    fault(f"self.progress.step == 1 and {first}", "os.kill(os.getpid(), 10)")
    axes = ["--sweep", "model.attention.kind=softmax,conformal_sympow"]
    axes += ["--sweep", "data.context=64,128"]
    brief = [*ONE_TASK, "trainer.max_tokens=2048", "trainer.micro_batch=1"]
    work.submit(*brief, *axes, "--throttle", "2")
    (array,) = work.jobs("small-sweep")
    most = 0
    deadline = time.monotonic() + 200
    while rows := cluster.run("squeue", "-h", "-r", "-j", array, "-o", "%T").stdout.split():
        most = max(most, rows.count("RUNNING"))
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert most == 2
    client = MlflowClient(f"sqlite:///{work.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.info.run_name == "small-sweep"]
    nested = [run for run in runs if run.info.run_name != "small-sweep"]
    assert len(parents) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parents[0].info.run_id}
    assert {run.info.run_name for run in nested} == {
        f"small-kind={kind}-context={context}"
        for kind in ("softmax", "conformal_sympow")
        for context in (64, 128)
    }
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert [cluster.job(f"{array}_{task}")["Restarts"] for task in range(4)] == list("1000")


@pytest.mark.wide
def test_a_large_job_is_accepted(
    make_work: Callable[..., Work], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(nodes=4, cpus=64, gpus=8, gpu_type="h100", extra="Feature=nvlink")
    small = make_work()
    work = dataclasses.replace(small, cluster=cluster)
    work.submit(
        *("trainer.nodes=4", "trainer.devices=8", "trainer.micro_batch=1"),
        *("optim.tokens_per_update=2048", "slurm.gpu=h100", "slurm.cpus_per_task=8"),
        *("slurm.account=physics", "slurm.qos=long", "slurm.constraint=nvlink"),
        *("slurm.exclusive=true", "slurm.time=1-00:00:00", "slurm.memory=60G"),
        "slurm.extra=[--hold]",
    )
    (job,) = work.jobs()
    found = cluster.job(job)
    assert found["NumNodes"] == "4-4"
    assert found["NumTasks"] == "32"
    assert found["TresPerNode"] == "gres:gpu:h100:8"
    assert (found["Account"], found["Features"]) == ("physics", "nvlink")
    assert (found["TimeLimit"], found["OverSubscribe"]) == ("1-00:00:00", "NO")
    # A Slurm without accounting takes any quality of service, and shows none.
    assert "#SBATCH --qos=long\n" in (work.folder / "slurm" / "train.sbatch").read_text()


@pytest.mark.wide
def test_a_job_that_cannot_fit_is_refused(work: Work) -> None:
    # 2 layers of 16,384 hold 6.5 billion parameters, which take 103 GB with gradients and moments;
    # one A100 has 80 GB.
    large = ["model.layers=2", "model.width=16384", "model.heads=128", "slurm.gpu=a100"]
    done = work.submit(*ONE_TASK, *large, check=False)
    assert done.returncode == 2
    assert "does not fit" in done.stderr
    assert not (work.path / "runs").exists()


@pytest.mark.parametrize("template", sorted((CHECKOUT / "slurm").glob("*.sbatch")))
def test_templates_are_sound(template: Path) -> None:
    subprocess.run(["bash", "-n", str(template)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # that of the development packages
    subprocess.run([str(shellcheck), "--shell=bash", str(template)], check=True)
