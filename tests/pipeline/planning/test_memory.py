"""Planned memory against real processes, and the plan's own sums."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from everyday_kinds import every_kind
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from longhaul.configs import RunConfig, load_run_config
from longhaul.kernels import power_attention, power_state, state_features
from longhaul.kernels.power import library
from longhaul.kernels.power.call import PowerCall, SavedState
from longhaul.kernels.power.cost import choose_chunk_size
from longhaul.kernels.power.torch import backend as chunked
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.cli import main
from longhaul.pipeline.distributed.blocks import Checkpointing
from longhaul.pipeline.distributed.context_parallel import ContextParallel
from longhaul.pipeline.planning import memory
from longhaul.pipeline.planning.capacity import num_parameters
from longhaul.pipeline.planning.fit import memory_rows, smallest_change, verdict, with_num_gpus
from longhaul.pipeline.planning.memory import MemorySettings, Planner
from longhaul.pipeline.planning.memory_tracker import CATEGORIES, MemoryTracker
from longhaul.pipeline.planning.op_workspaces import OpWorkspace, traced_as
from longhaul.pipeline.system.devices import Device

PAPER = "run/paper/conformal-sympow-p2-1024.yaml"
SCRIPT = Path(__file__).with_name("measured_update.py")
SMALL = ("model.width=64", "model.heads=4", "data.context=128")
NEOX = ["model.embedding_norm=false", "model.parallel_residual=true"]
NEOX += ["model.biases=true", "model.tied_head=false"]
LIGHT = ["trainer.activation_checkpointing=light"]
LLAMA = ["model.norm=rms", "model.mlp=swiglu", "model.mlp_width=512", "model.norm_order=sandwich"]

either_accumulation = pytest.mark.parametrize(
    "accumulation", [pytest.param(1, marks=pytest.mark.wide), 3]
)


def config(*overrides: str, ranks: int = 1) -> RunConfig:
    spread = ("trainer.strategy=ddp", f"trainer.devices={ranks}") if ranks > 1 else ()
    return load_run_config("run/demo.yaml", [*overrides, *spread])


def small(ranks: int, accumulation: int, micro_batch: int = 2, layers: int = 2) -> RunConfig:
    tokens = 128 * ranks * accumulation * micro_batch
    sizes = (f"optim.tokens_per_update={tokens}", f"trainer.micro_batch={micro_batch}")
    return config(*SMALL, *sizes, f"model.layers={layers}", ranks=ranks)


def measure(strategies: str, ranks: int, overrides: list[str], store: Path) -> list[list[int]]:
    """Bytes of every rank of real runs, which know nothing of the plan: a list a strategy."""
    environment = os.environ | {
        # Large blocks go back to the system when they are freed.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", str(SCRIPT), strategies]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store), "run/demo.yaml", *overrides],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        # Collectives that wait give up after 60 s; the rest is for a machine that others use.
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks
    by_rank = [[int(line) for line in output.split()] for output in outputs]
    return [list(of_strategy) for of_strategy in zip(*by_rank, strict=True)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory: Linux")
@pytest.mark.parametrize(
    ("strategies", "ranks", "shape"),
    [
        pytest.param("single", 1, [], marks=pytest.mark.soak),
        pytest.param("single", 1, LLAMA, marks=pytest.mark.soak),
        pytest.param("single", 1, LIGHT, marks=pytest.mark.soak),
        pytest.param("ddp,fsdp", 2, [], marks=pytest.mark.soak),
        pytest.param("ddp,fsdp", 2, NEOX, marks=pytest.mark.soak),
        pytest.param("ddp,fsdp", 2, ["optim.name=muon"], marks=pytest.mark.wide),
    ],
)
def test_the_plan_is_within_a_tenth_of_what_a_rank_holds(
    strategies: str, ranks: int, shape: list[str], tmp_path: Path
) -> None:
    overrides = ["trainer.micro_batch=4", "optim.tokens_per_update=4096", *shape]
    if ranks > 1:
        overrides += ["trainer.strategy=ddp", f"trainer.devices={ranks}"]
    run = load_run_config("run/demo.yaml", overrides)
    planner, mode = Planner(run, "torch"), run.trainer.activation_checkpointing
    measured = measure(strategies, ranks, overrides, tmp_path / "store")
    for strategy, found in zip(strategies.split(","), measured, strict=True):
        planned = planner.plan(MemorySettings(strategy=strategy, checkpointing=mode)).total
        print(f"{strategy}: planned {planned / 1e6:.1f} MB, held", [one / 1e6 for one in found])
        assert found == [pytest.approx(planned, rel=0.1)] * ranks


def test_live_memory_counts_as_torch_does() -> None:
    """Torch's own tracker, which is too slow for large models, sees the same peak."""
    model_config = small(ranks=1, accumulation=1).model
    peaks = []
    for tracker in (MemoryTracker(), MemTracker()):
        with FakeTensorMode(), tracker:
            model = LanguageModel(model_config)
            if isinstance(tracker, MemTracker):
                tracker.track_external(model)
            tokens = torch.zeros(4, 128, dtype=torch.int64)
            model.loss(tokens, tokens).backward()
            if isinstance(tracker, MemTracker):
                (snapshot,) = tracker.get_tracker_snapshot("peak").values()
                peaks.append(snapshot["Total"])
            else:
                peaks.append(sum(tracker.peak.values()))
    assert peaks[0] == peaks[1]


@either_accumulation
def test_parts_add_up_and_fsdp_holds_its_share(accumulation: int) -> None:
    ranks = 4
    planner = Planner(small(ranks, accumulation))
    with torch.device("meta"):
        numbers = LanguageModel(small(ranks, accumulation).model).num_parameters()
    single, ddp, fsdp, *zero = (
        planner.plan(MemorySettings(strategy=strategy, stage=stage))
        for strategy, stage in (
            ("single", None), ("ddp", None), ("fsdp", None),
            ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3),
        )
    )  # fmt: skip
    for plan in (single, ddp, fsdp, *zero):
        assert plan.total == sum(getattr(plan, part) for part in CATEGORIES)
        assert min(getattr(plan, part) for part in CATEGORIES) >= 0
    assert single.parameters == ddp.parameters == 4 * numbers
    # Rows are dealt out whole: a tensor of fewer rows than ranks leaves some with one too many.
    assert fsdp.parameters == pytest.approx(single.parameters / ranks, rel=0.01)
    assert ddp.gradients == 4 * numbers
    if accumulation > 1:  # gradients wait for the last micro-batch, with fsdp in shards
        assert single.gradients == 4 * numbers
        assert fsdp.gradients == pytest.approx(numbers, rel=0.01)
    scalars = single.optimizer - 2 * single.parameters  # steps, one for every tensor
    assert 0 < scalars < 1000
    assert fsdp.optimizer == pytest.approx(single.optimizer / ranks, rel=0.01)
    assert [plan.parameters for plan in zero] == [4 * numbers, 4 * numbers, numbers]
    assert [plan.gradients for plan in zero] == [4 * numbers, numbers, numbers]
    assert [plan.optimizer for plan in zero] == [3 * numbers] * 3
    # One bucket where reducing overlaps nothing, two where it does, one and what stage 3 gathers.
    assert [plan.copies for plan in zero] == [4 * numbers, 8 * numbers, 8 * numbers]


@pytest.mark.wide
def test_muon_keeps_one_moment_of_matrices_and_exchanges_them() -> None:
    ranks = 4
    run = small(ranks, accumulation=1)
    muon = replace(run, optim=replace(run.optim, name="muon"))
    with torch.device("meta"):
        model = LanguageModel(run.model)
    matrices = 4 * sum(p.numel() for name, p in model.blocks.named_parameters()
                       if name.endswith(("qkv.weight", "out.weight", "up.weight")))  # fmt: skip
    for strategy, share in (("single", 1), ("ddp", 1), ("fsdp", ranks)):
        adam, own = (Planner(one).plan(MemorySettings(strategy=strategy)) for one in (run, muon))
        assert adam.optimizer - own.optimizer == pytest.approx(matrices / share, rel=0.001)
        # To the ranks that iterate and back. The first may iterate for more than its share.
        exchanged = 2 * (ranks - 1) / ranks * matrices / ranks if strategy == "fsdp" else 0
        assert own.sent - adam.sent == pytest.approx(exchanged, rel=0.1)
    device = Device(
        key="x", name="X", memory_bytes=10**12, bf16_flops=1, tf32_flops=1, fp32_flops=1,
        reported=("X",),
    )  # fmt: skip
    strategies = [row[0] for row in memory_rows(muon, device, Planner(muon))[1:]]
    assert set(strategies) == {"single", "ddp", "fsdp"}


@either_accumulation
def test_only_what_a_strategy_must_send_is_sent(accumulation: int) -> None:
    ranks = 4
    planner = Planner(small(ranks, accumulation))
    whole = planner.plan(MemorySettings(strategy="single")).parameters

    def in_models(sent: float) -> float:
        return sent / whole * ranks / (ranks - 1)

    sent = {
        name: in_models(planner.plan(MemorySettings(strategy=name, stage=stage)).sent)
        for name, stage in (("single", None), ("ddp", None), ("fsdp", None))
    }
    assert sent["single"] == 0
    assert sent["ddp"] == 2  # a reduce-scatter and an all-gather, once
    # For each micro-batch blocks are gathered twice, what is outside of them once, and gradients
    # reduced once.
    model = LanguageModel(small(ranks, accumulation).model)
    outside = 1 - sum(p.numel() for p in model.blocks.parameters()) / model.num_parameters()
    wanted = accumulation * (3 - outside)
    assert sent["fsdp"] == pytest.approx(wanted, rel=0.005)
    stages = [
        in_models(planner.plan(MemorySettings(strategy="deepspeed", stage=stage)).sent)
        for stage in (1, 2, 3)
    ]
    assert stages == [2, accumulation + 1, 3 * accumulation]


LONG = ("data.context=1024", "trainer.micro_batch=1", "optim.tokens_per_update=1024")


@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(one, marks=pytest.mark.wide) for one in ("ddp", "deepspeed")), "fsdp"],
)
def test_ranks_that_share_sequences_hold_a_part_of_the_activations(strategy: str) -> None:
    one = Planner(config(*SMALL, *LONG))
    shared = Planner(config(*SMALL, *LONG, "trainer.context_parallel=4", ranks=4))
    settings = MemorySettings(strategy=strategy, stage=2 if strategy == "deepspeed" else None)
    whole = one.plan(MemorySettings(strategy="single"))
    part = shared.plan(settings)
    # Each rank also holds the states that it exchanges.
    assert part.activations < 0.6 * whole.activations
    alone = Planner(config(*SMALL, *LONG, "optim.tokens_per_update=4096", ranks=4)).plan(settings)
    states = part.sent - alone.sent
    assert states > 0, "the ranks exchange states"
    assert shared.plan(MemorySettings(strategy="single")).activations == whole.activations


def test_what_a_rank_sends_is_counted_once_for_each_other_rank() -> None:
    with memory._fake_ranks(4):
        for part in (ContextParallel(dist.group.WORLD), memory._LastPart(4)):
            part.all_gather(torch.zeros(5, dtype=torch.uint8))
            assert part.bytes_sent == 3 * 5
            part.all_to_all(torch.zeros(4, 5, dtype=torch.uint8), [1] * 4, [1] * 4)
            assert part.bytes_sent == 2 * 3 * 5


def test_a_run_that_shares_sequences_fits_where_whole_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_GROUP", 0)  # it is more than this model takes
    run = config(*SMALL, *LONG, "trainer.context_parallel=4", ranks=4)
    planner = Planner(run)
    held = planner.plan(MemorySettings(strategy="ddp")).held
    device = Device(
        key="x", name="X", memory_bytes=held, bf16_flops=1, tf32_flops=1, fp32_flops=1,
        reported=("X",),
    )  # fmt: skip
    assert verdict(run, device, planner).endswith("fits.")
    assert held < Planner(config(*SMALL, *LONG)).plan(MemorySettings(strategy="single")).held


@pytest.mark.wide
def test_smaller_micro_batches_are_those_of_a_group_of_ranks() -> None:
    """Four ranks that share sequences take as many samples as one rank does."""
    sizes = ("data.context=128", "trainer.micro_batch=4", "optim.tokens_per_update=512")
    run = config(*SMALL, *sizes, "trainer.context_parallel=4", "model.layers=1", ranks=4)
    planner = Planner(run)
    plan = planner.plan(MemorySettings(strategy="ddp"))
    change = smallest_change(run, plan.held - 1)
    assert change is not None
    assert change.startswith("trainer.micro_batch=2 ")


@pytest.mark.wide
def test_replicas_hold_the_whole_model_together() -> None:
    run = ("trainer.strategy=fsdp", "trainer.devices=4")
    sizes = (*SMALL, "trainer.micro_batch=1", "optim.tokens_per_update=512", "model.layers=2")
    settings = MemorySettings(strategy="fsdp")
    flat, copies, whole = (
        Planner(load_run_config("run/demo.yaml", [*sizes, *run, *more])).plan(settings)
        for more in ([], ["trainer.replicas=2"], ["trainer.no_shard_below=1000000000"])
    )
    assert copies.parameters == pytest.approx(2 * flat.parameters, rel=0.01)
    assert copies.optimizer == pytest.approx(2 * flat.optimizer, rel=0.01)
    assert whole.parameters == pytest.approx(4 * flat.parameters, rel=0.01)
    ddp = Planner(config(*sizes, ranks=4)).plan(MemorySettings(strategy="ddp"))
    assert whole.sent == ddp.sent


@pytest.mark.wide
def test_products_in_bfloat16_gather_and_send_half() -> None:
    run = ("trainer.strategy=fsdp", "trainer.devices=4", "model.layers=2")
    sizes = (*SMALL, "trainer.micro_batch=1", "optim.tokens_per_update=512")
    settings = MemorySettings(strategy="fsdp")
    single, mixed = (
        Planner(load_run_config("run/demo.yaml", [*sizes, *run, f"trainer.precision={name}"])).plan(
            settings
        )
        for name in ("32-true", "bf16-mixed")
    )
    # Gathered twice and reduced once, of which only the gathering is in 16 bits.
    assert 0.6 < mixed.sent / single.sent < 0.7
    assert mixed.parameters == single.parameters


def test_offloaded_moments_take_no_memory_of_a_gpu() -> None:
    run = ("trainer.strategy=deepspeed", "trainer.devices=2", "trainer.offload_optimizer=true")
    sizes = (*SMALL, "trainer.micro_batch=1", "optim.tokens_per_update=256", "model.layers=1")
    planner = Planner(load_run_config("run/demo.yaml", [*sizes, *run]))
    assert planner.plan(MemorySettings(strategy="deepspeed", stage=2)).optimizer == 0


@pytest.mark.wide
def test_checkpointing_and_small_batches_need_less() -> None:
    planner = Planner(small(ranks=2, accumulation=1, micro_batch=8, layers=3))
    for strategy in ("single", "ddp", "fsdp"):
        modes: tuple[Checkpointing, ...] = (0, "light", 2, 1)
        kept, light, second, recomputed = (
            planner.plan(MemorySettings(strategy=strategy, checkpointing=mode)) for mode in modes
        )
        assert recomputed.activations < light.activations < 0.75 * kept.activations
        assert recomputed.activations < second.activations < kept.activations
        assert recomputed.parameters == kept.parameters
        assert planner.plan(MemorySettings(strategy=strategy), 4).total < kept.total


@pytest.mark.wide
def test_the_smallest_change_that_fits_is_named_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUP", 0)  # it is more than this model takes
    run = small(ranks=2, accumulation=1, micro_batch=8, layers=1)
    planner = Planner(run)
    whole = planner.plan(MemorySettings(strategy="ddp")).held
    half = planner.plan(MemorySettings(strategy="ddp"), 4).held
    recomputed = planner.plan(MemorySettings(strategy="fsdp", checkpointing=1), 1).held

    def on(memory: int) -> str:
        device = Device(
            key="x", name="X", memory_bytes=memory, bf16_flops=1, tf32_flops=1,
            fp32_flops=1, reported=("X",),
        )  # fmt: skip
        return verdict(run, device, planner)

    assert on(whole).endswith("fits.")
    assert "does not fit; the smallest change that would: trainer.micro_batch=4 " in on(whole - 1)
    assert "trainer.micro_batch=2 " in on(half - 1)
    change = "trainer.strategy=fsdp trainer.activation_checkpointing=1 trainer.micro_batch=1 "
    assert change in on(recomputed)
    assert on(recomputed - 1).endswith("does not fit, and no strategy or micro-batch here would.")


def test_light_checkpointing_is_named_where_it_is_enough() -> None:
    run = config(*SMALL, *LONG)
    light = Planner(run).plan(MemorySettings(strategy="single", checkpointing="light")).held
    for memory_bytes, mode in ((light, "light"), (light - 1, "1")):
        change = smallest_change(run, memory_bytes)
        assert change is not None
        assert change.startswith(f"trainer.activation_checkpointing={mode} (")


def test_what_is_no_tensor_counts_too() -> None:
    run = small(ranks=2, accumulation=1)
    single, ddp, fsdp = (
        Planner(run).plan(MemorySettings(strategy=name)) for name in ("single", "ddp", "fsdp")
    )
    assert single.held == pytest.approx(1.05 * single.total + 1e9, abs=2)  # context, and gaps
    assert ddp.held == pytest.approx(1.05 * ddp.total + 1.5e9, abs=2)  # NCCL's buffers
    assert fsdp.held == pytest.approx(1.05 * fsdp.total + 2e9, abs=2)


def test_the_model_that_is_evaluated_counts_where_an_update_takes_less() -> None:
    sizes = ("trainer.micro_batch=1", "optim.tokens_per_update=128", "model.layers=1")
    run = config(*SMALL, *sizes, "evaluation.tasks=[positions]")
    plan = Planner(run).plan(MemorySettings(strategy="single"))
    assert plan.evaluation_model == 4 * num_parameters(run.model)
    assert replace(plan, evaluation_model=0).held == plan.held, "an update takes more"
    plan = replace(plan, activations=0, workspace=0, copies=0)
    more = plan.held - replace(plan, evaluation_model=0).held
    assert more == pytest.approx(1.05 * plan.evaluation_model, abs=2)


@every_kind
def test_every_kind_can_be_traced(kind: str) -> None:
    sizes = ("model.layers=1", "trainer.micro_batch=1", "optim.tokens_per_update=128")
    run = load_run_config("run/demo.yaml", [*SMALL, *sizes], kind=kind)
    plan = Planner(run).plan(MemorySettings(strategy="single", checkpointing=1))
    tokens, width = 128, 64
    assert plan.activations > 4 * tokens * width  # what a recomputed block starts from


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_learned_initial_state_can_be_traced(backend: Literal["torch", "triton"]) -> None:
    sizes = ("model.layers=1", "trainer.micro_batch=1", "optim.tokens_per_update=128")
    learned, zero = (
        Planner(config(*SMALL, *sizes, f"model.attention.initial_state={state}"), backend).plan(
            MemorySettings(strategy="single")
        )
        for state in ("learned", "zero")
    )
    assert learned.parameters > zero.parameters


def test_an_op_of_states_takes_what_its_own_code_allocates() -> None:
    shape = 1, 256, 4, 64
    live = MemoryTracker(OpWorkspace())
    with FakeTensorMode(), live:
        k = torch.zeros(shape, requires_grad=True)
        state = power_state(k, k, degree=2)
        (state.kv.sum() + state.norm.sum()).backward()
    call = library.state_call(2, choose_chunk_size(256, 64, 64, 2))
    with MemoryTracker() as real:
        k = torch.zeros(shape)
        kv, norm = chunked.state_forward(call, k, k, None, None, None, None)
        saved = SavedState(k, k, None, None, None, None, kv, norm)
        held = sum(real.now.values())
        real.reset_peak()
        chunked.state_backward(call, saved, kv, norm)
    assert live.peak["workspace"] == sum(real.peak.values()) - held


def test_states_of_the_kernels_are_counted() -> None:
    T, H, K = 16_384, 4, 64
    live = MemoryTracker(OpWorkspace())
    with traced_as("triton"), FakeTensorMode(), live:
        q, k, v = (
            torch.zeros(1, T, H, K, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        inputs = sum(live.now.values())
        out, _ = power_attention(q, k, v, degree=2)
        out.sum().backward()
    states = T // choose_chunk_size(T, K, K, 2, "triton") * H * state_features(K, 2) * (K + 1) * 4
    assert live.peak["workspace"] > states > inputs
    assert sum(live.peak.values()) < 4 * inputs + 2 * states


def test_an_op_takes_what_its_own_code_allocates() -> None:
    shape = 1, 256, 4, 64
    live = MemoryTracker(OpWorkspace())
    with FakeTensorMode(), live:
        q = torch.zeros(shape)
        power_attention(q, q, q, degree=2)
    call = PowerCall(
        degree=2, scale=0.125, normalize=True, output_final_state=False, form="attention",
        chunk_size=256,
    )  # fmt: skip
    with MemoryTracker() as real:
        q = torch.zeros(shape)
        chunked.forward(call, q, q, q, None, None, None, None)
    assert live.peak["workspace"] + q.nbytes == sum(real.peak.values())


@pytest.mark.soak
def test_a_thousand_ranks_are_planned_at_the_longest_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["data.context=65536", "trainer.micro_batch=1", "optim.tokens_per_update=67108864"]
    start = time.perf_counter()
    assert main(["plan", PAPER, *overrides, "--gpus", "1024", "--device", "h100"]) == 0
    seconds = time.perf_counter() - start
    table, closing = capsys.readouterr().out.strip().split("\n\n")[-2:]
    print(f"{seconds:.0f} s\n{table}\n{closing}")
    assert len(table.splitlines()) == 1 + 6 * 3
    assert "(ddp, checkpointing none, micro-batch 1)" in closing
    assert seconds < 300  # under a minute; this machine may be shared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0", "--device", "h100"], "--gpus: found 0, wanted 1 or more"),
        (
            ["--gpus", "3", "--device", "h100"],
            "--gpus: found 3: run/demo.yaml: optim.tokens_per_update: found",
        ),
        (["--device", "v100"], "--device: found 'v100', wanted one of a100, "),
        (["--gpus", "2"], "--device: found none with --gpus, wanted one of a100, "),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "run/demo.yaml", *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"longhaul: {message}")
    assert len(error.splitlines()) == 1
    assert out == ""


def test_ranks_that_an_update_has_too_few_samples_for_get_smaller_micro_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = load_run_config("run/demo.yaml")  # 16 samples of 512 tokens in an update
    with caplog.at_level("INFO"):
        planned = with_num_gpus("run/demo.yaml", [], run, 8).trainer
    assert (planned.micro_batch, planned.devices, planned.strategy) == (2, 8, "ddp")
    assert "--gpus 8: planned with trainer.micro_batch=2, not 8" in caplog.text
    assert with_num_gpus("run/demo.yaml", [], run, 2).trainer.micro_batch == 8
