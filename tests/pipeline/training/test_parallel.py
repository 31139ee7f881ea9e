"""Every strategy trains like one process, shards what it says, and takes over from any other."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
ONE_RANK = Path(__file__).parent / "one_rank.py"
KINDS = ("softmax", "conformal_sympow", "zeros")
# Other shapes of the model. In the first the head has a matrix of its own.
SHAPES = {
    "gpt-neox": [
        "model.embedding_norm=false",
        "model.parallel_residual=true",
        "model.biases=true",
        "model.tied_head=false",
    ],
    "gemma": [
        "model.norm=rms_offset",
        "model.norm_order=sandwich",
        "model.mlp=geglu",
        "model.mlp_width=72",
        "model.biases=[qkv]",
        "model.embedding_scale=2.0",
        "model.logit_softcap=5.0",
        "optim.z_loss=1e-3",
    ],
}
MUON = "muon"
UPDATES, HALF = 20, 10
COMMON = [
    "data.workers=0",
    # The rate of the papers. At five times that, rounding alone moves zeros' losses by 1e-5.
    "optim.learning_rate=6e-4",
]

ZERO_1, ZERO_2, ZERO_3 = (
    ["trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}"] for stage in (1, 2, 3)
)

# Ranks, and what makes a run one of this kind.
WAYS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ddp-2": (2, ["trainer.strategy=ddp"]),
    "fsdp-2": (2, ["trainer.strategy=fsdp"]),
    "deepspeed1-2": (2, ZERO_1),
    "deepspeed2-2": (2, ZERO_2),
    "deepspeed3-2": (2, ZERO_3),
    "context-2": (2, ["trainer.strategy=ddp", "trainer.context_parallel=2"]),
    "ddp-3": (3, ["trainer.strategy=ddp"]),
    "fsdp-3": (3, ["trainer.strategy=fsdp"]),
    "fsdp-4": (4, ["trainer.strategy=fsdp"]),
    "context-2x2": (4, ["trainer.strategy=ddp", "trainer.context_parallel=2"]),
    "replicas-2x2": (4, ["trainer.strategy=fsdp", "trainer.replicas=2"]),
    "recomputed": (2, ["trainer.strategy=fsdp", "trainer.activation_checkpointing=1"]),
    "not-sharded": (2, ["trainer.strategy=fsdp", "trainer.no_shard_below=1000000"]),
    "offload1-2": (2, [*ZERO_1, "trainer.offload_optimizer=true"]),
    "offload2-2": (2, [*ZERO_2, "trainer.offload_optimizer=true"]),
    "offload3-2": (2, [*ZERO_3, "trainer.offload_optimizer=true"]),
    "compiled": (1, ["trainer.compile=true"]),
    "compiled-ddp-2": (2, ["trainer.strategy=ddp", "trainer.compile=true"]),
    "compiled-fsdp-2": (2, ["trainer.strategy=fsdp", "trainer.compile=true"]),
}
# What is shown for one kind of attention alone, the other ways being shown for all.
OFFLOADED = ("offload1-2", "offload2-2", "offload3-2")
COMPILED = ("compiled", "compiled-ddp-2", "compiled-fsdp-2")
ONCE = ("replicas-2x2", "recomputed", "not-sharded", *OFFLOADED, *COMPILED)
THREE_RANKS = ("ddp-3", "fsdp-3")
FOUR_RANKS = ("fsdp-4", "context-2x2", "replicas-2x2")
SLOW = (*FOUR_RANKS, "offload1-2", "offload3-2", *COMPILED)
STRATEGIES = (
    *("single", "ddp-2", "fsdp-2", "context-2", "deepspeed1-2", "deepspeed2-2", "deepspeed3-2"),
)
FOR_ALL_KINDS = ("single", "ddp-2", "fsdp-2")
# `make test` trains under each strategy once (ddp with context_parallel=2, deepspeed at stage 3),
# and resumes a checkpoint of fsdp on one process. `make test-all` has more, `make soak` the rest.
EVERYDAY = ("single", "fsdp-2", "context-2", "deepspeed3-2")
IN_TEST = (("fsdp-2", "single"),)
IN_TEST_ALL = (("single", "fsdp-2"), ("ddp-2", "fsdp-2"))
IN_TEST_ALL += (("single", "deepspeed2-2"), ("deepspeed3-2", "single"))
HOLDING = ("single", "ddp-2", "context-2", "not-sharded", "fsdp-2", "recomputed")
HOLDING += ("deepspeed1-2", "deepspeed2-2", "deepspeed3-2", "offload2-2")
MUONS = ("single", "ddp-2", "fsdp-2", *THREE_RANKS, "replicas-2x2")
HANDED = ("single", "ddp-2", "fsdp-2", "fsdp-4", "deepspeed1-2", "deepspeed2-2", "deepspeed3-2")


def _case(*values: str, in_test: bool, in_test_all: bool) -> Any:
    mark = pytest.mark.wide if in_test_all else pytest.mark.soak
    return pytest.param(*values, marks=[] if in_test else [mark])


COMBINATIONS = [
    _case(
        way,
        kind,
        in_test=kind == "conformal_sympow" and way in EVERYDAY,
        in_test_all=(kind == "conformal_sympow" and way not in SLOW) or way in FOR_ALL_KINDS,
    )
    for way in WAYS
    for kind in KINDS
    if way not in THREE_RANKS
    and not (way in ONCE and kind != "conformal_sympow")
    and not (way.startswith("context") and kind == "softmax")
]
COMBINATIONS += [
    _case(way, shape, in_test=False, in_test_all=way == "fsdp-2")
    for way in STRATEGIES
    for shape in SHAPES
]
# Its parameters begin otherwise than by `init`, and some are never cast to 16 bits.
RECURRENT = "gated_deltanet"
COMBINATIONS += [
    _case(way, RECURRENT, in_test=False, in_test_all=way == "fsdp-2")
    for way in STRATEGIES
    if way not in ("single", "context-2")
]
COMBINATIONS += [
    _case(way, MUON, in_test=False, in_test_all=way == "fsdp-2") for way in MUONS if way != "single"
]
HANDOVERS = [
    _case(
        before,
        after,
        "conformal_sympow",
        in_test=(before, after) in IN_TEST,
        in_test_all=(before, after) in IN_TEST_ALL,
    )
    for before in HANDED
    for after in HANDED
    # Between DeepSpeed's stages it is the same path: each is left and entered by the others.
    if before == after or "deep" not in before or "deep" not in after
]
HANDOVERS += [
    _case(before, after, "conformal_sympow", in_test=False, in_test_all=False)
    for before, after in (
        *((way, way) for way in (*OFFLOADED, *COMPILED)),
        *(("single", way) for way in OFFLOADED),
        ("deepspeed3-2", "offload2-2"),
        ("offload3-2", "single"),
    )
]
HANDOVERS += [_case("fsdp-2", "deepspeed3-2", RECURRENT, in_test=False, in_test_all=True)]
HANDOVERS += [
    _case(before, after, MUON, in_test=False, in_test_all=True)
    for before, after in (("single", "fsdp-3"), ("fsdp-3", "ddp-2"), ("ddp-3", "fsdp-2"))
]


def _selected(request: pytest.FixtureRequest, test: str) -> list[tuple[str, ...]]:
    """Parameters of a test that are going to be run."""
    items: Any = request.session.items
    return [tuple(item.callspec.params.values()) for item in items if item.originalname == test]


def _run_together(fork: Any, run: Run, jobs: dict[int, list[list[str]]]) -> None:
    """Lists of trainings by the number of their ranks, each list in as many processes."""
    for ranks, arguments in jobs.items():
        if not arguments:
            continue
        file = run.path / f"jobs-{ranks}.json"
        file.write_text(json.dumps(arguments))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
        processes = []
        for rank in range(ranks):
            own = {**common, "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            code = f"""import os, runpy
os.environ.update({own!r})
runpy.run_path({str(ONE_RANK)!r}, run_name="__main__")"""
            processes.append(fork(code, run.path, str(file)))
        for process in processes:
            _, error = process.communicate(timeout=600)
            assert process.returncode == 0, error[-3000:]


def _arguments(way: str, kind: str, name: str) -> list[str]:
    ranks, overrides = WAYS[way]
    micro_batch = 2 if ranks < 4 or way == "context-2x2" else 1
    options, tokens = SHAPES.get(kind, [f"model.attention.kind={kind}"]), 512
    if kind == MUON:
        options, tokens = ["optim.name=muon"], 768  # which three ranks can share
    return [
        "small.yaml",
        f"name={name}",
        *options,
        f"optim.tokens_per_update={tokens}",
        f"trainer.max_tokens={tokens * UPDATES}",
        f"trainer.validate_every_tokens={tokens * HALF}",
        f"checkpoint.every_tokens={tokens * HALF}",
        f"trainer.devices={ranks}",
        f"trainer.micro_batch={micro_batch}",
        *COMMON,
        *overrides,
    ]


def _losses(run: Run, name: str) -> dict[int, float]:
    lines = (run.path / name / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["values"]["curves/train_loss"] for e in entries if e["kind"] == "train"}


@pytest.fixture(scope="module")
def trained(make_run: Any, fork: Any, request: pytest.FixtureRequest) -> Run:
    """The ways and kinds that are asked for, each trained once; `WAY-KIND` names the run."""
    run = make_run(UPDATES)
    jobs: dict[int, list[list[str]]] = {1: [], 2: [], 3: [], 4: []}
    asked = _selected(request, "test_losses_are_those_of_one_process")
    asked += [("single", kind) for _, kind in asked]
    if "test_each_rank_holds_its_share" in [item.name for item in request.session.items]:
        asked += [(way, "conformal_sympow") for way in HOLDING]
    asked += [
        (before, kind)
        for before, _, kind in _selected(request, "test_a_checkpoint_goes_on_under_any_strategy")
    ]
    for way, kind in dict.fromkeys(asked):
        jobs[WAYS[way][0]].append(_arguments(way, kind, f"{way}-{kind}"))
    _run_together(fork, run, jobs)
    return run


@pytest.fixture(scope="module")
def handed_over(trained: Run, fork: Any, request: pytest.FixtureRequest) -> Run:
    """Runs `BEFORE-to-AFTER-KIND` that began with the other's checkpoint of half the way."""
    jobs: dict[int, list[list[str]]] = {1: [], 2: [], 3: [], 4: []}
    asked = _selected(request, "test_a_checkpoint_goes_on_under_any_strategy")
    for before, after, kind in asked:
        name = f"{before}-to-{after}-{kind}"
        half = f"checkpoints/step-{HALF:09d}"
        source = trained.path / f"{before}-{kind}" / half
        shutil.copytree(source, trained.path / name / half)
        jobs[WAYS[after][0]].append(_arguments(after, kind, name))
    _run_together(fork, trained, jobs)
    return trained


@pytest.mark.parametrize(("way", "kind"), COMBINATIONS)
def test_losses_are_those_of_one_process(trained: Run, way: str, kind: str) -> None:
    found, wanted = (_losses(trained, f"{one}-{kind}") for one in (way, "single"))
    assert list(found) == list(wanted) == list(range(1, UPDATES + 1))
    assert max(abs(found[step] - wanted[step]) for step in wanted) < 1e-5


@pytest.mark.wide
def test_each_rank_holds_its_share(trained: Run) -> None:
    def held(way: str, rank: int) -> dict[str, int]:
        folder = trained.path / f"{way}-conformal_sympow"
        return dict(json.loads((folder / f"rank-{rank}.json").read_text()))

    whole = held("single", 0)
    assert whole["moments"] == 2 * whole["parameters"]
    for way in ("ddp-2", "context-2", "not-sharded"):
        assert held(way, 1) == whole
    shards = [("fsdp-2", 2), ("recomputed", 2), ("fsdp-4", 4), ("replicas-2x2", 2)]
    for way, ranks in shards if (trained.path / "fsdp-4-conformal_sympow").exists() else shards[:2]:
        shares = [held(way, rank) for rank in range(ranks)]
        for part in ("parameters", "moments"):
            assert sum(share[part] for share in shares) == whole[part]
            # Rows of a matrix do not always divide by the ranks.
            assert max(share[part] for share in shares) < 1.1 * whole[part] / ranks
    for way in ("deepspeed1-2", "deepspeed2-2", "deepspeed3-2", "offload2-2"):
        assert held(way, 1)["moments"] < 0.6 * whole["moments"]


@pytest.mark.parametrize(("before", "after", "kind"), HANDOVERS)
def test_a_checkpoint_goes_on_under_any_strategy(
    handed_over: Run, before: str, after: str, kind: str
) -> None:
    found = _losses(handed_over, f"{before}-to-{after}-{kind}")
    wanted = _losses(handed_over, f"{before}-{kind}")
    assert list(found) == list(range(HALF + 1, UPDATES + 1))
    assert max(abs(found[step] - wanted[step]) for step in found) < 1e-6
