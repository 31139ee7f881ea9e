"""What the strategies refuse and ask for on GPUs; test_parallel.py trains with each."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from longhaul.configs import load_run_config
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.distributed import deepspeed
from longhaul.pipeline.distributed.blocks import device_mesh
from longhaul.pipeline.distributed.deepspeed import DeepSpeedZero
from longhaul.pipeline.distributed.launch import collective_timeout, limit_collectives
from longhaul.pipeline.distributed.strategies import build_strategy
from longhaul.pipeline.distributed.zero import bucket_sizes, zero_config
from longhaul.pipeline.training import callback, run
from longhaul.pipeline.training.callback import TrainingCallback

TWO = ["trainer.devices=2", "trainer.micro_batch=1"]


@pytest.fixture
def connected() -> Iterator[None]:
    """This process is the only rank, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_moments_without_a_step_are_refused_before_anything_is_restored() -> None:
    saved: Any = SimpleNamespace(path="RUN/step_5", tensors={"optimizer/head/exp_avg": None})
    unused: Any = None
    with pytest.raises(CheckpointError, match="RUN/step_5: found no parameter's step"):
        DeepSpeedZero.restore(unused, unused, unused, saved)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed"])
def test_ranks_are_connected_by_one_backend_that_outwaits_the_watchdog(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def note(self: Any, **options: Any) -> None:
        self._process_group_backend = options["process_group_backend"]
        self._timeout = options["timeout"]
        self.parallel_devices = options["parallel_devices"]

    monkeypatch.setattr(DeepSpeedStrategy, "__init__", note)  # it would import DeepSpeed
    options = [*TWO, f"trainer.strategy={name}", "trainer.hang_seconds=7200"]
    devices = [torch.device(device, index) for index in range(2)]
    strategy: Any = build_strategy(load_run_config("run/demo.yaml", options), devices)
    assert strategy._process_group_backend == ("nccl" if device == "cuda" else "gloo")
    assert strategy._timeout == timedelta(seconds=7500)
    assert strategy.parallel_devices == devices


def timeout(group: Any) -> timedelta:
    found = group._get_backend(torch.device("cpu")).options._timeout
    assert isinstance(found, timedelta)
    return found


def test_groups_that_libraries_make_have_the_timeout_too(connected: None) -> None:
    groups = [dist.group.WORLD, dist.new_group([0])]
    wanted = collective_timeout(load_run_config("run/demo.yaml", []).trainer)
    assert wanted == timedelta(seconds=2100)
    assert all(timeout(group) != wanted for group in groups)
    limit_collectives(wanted)
    assert [timeout(group) for group in groups] == [wanted, wanted]


def test_a_training_limits_all_groups_and_its_own_from_when_they_connect(
    connected: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_run_config("run/demo.yaml", ["trainer.hang_seconds=7200"])
    this: Any = SimpleNamespace(
        config=config, _folder=SimpleNamespace(checkpoints=tmp_path), recorder=None,
        _validation=SimpleNamespace(validate_if_due=None),
        _record=None, _stop_if_due=None, _profile_if_due=None,
        data=SimpleNamespace(start_at=lambda *_: None),
        requests=SimpleNamespace(mark_ranks_connected=lambda: None),
    )  # fmt: skip
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        global_rank=0, world_size=1, num_nodes=1,
    )  # fmt: skip
    module = run.build_module(load_run_config("run/demo.yaml", ["model.layers=1"]))
    at_first = []

    def limit(wanted: timedelta) -> None:
        at_first.extend(timeout(group) for group in (this.saving.store._group, this._group))
        limit_collectives(wanted)

    monkeypatch.setattr(callback, "limit_collectives", limit)
    TrainingCallback.on_fit_start(this, trainer, module)
    this.watchdog.stop()
    assert at_first == 2 * [timedelta(seconds=7500)]
    groups = (dist.group.WORLD, this.saving.store._group, this._group)
    assert [timeout(group) for group in groups] == 3 * [timedelta(seconds=7500)]


def test_a_mesh_makes_no_groups_of_one_rank() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        whole, copies = device_mesh("cpu", 4, 1), device_mesh("cpu", 4, 2)
        assert (whole.shape, whole.get_group()) == ((4,), dist.group.WORLD)
        assert (copies.shape, copies.mesh_dim_names) == ((2, 2), ("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def test_a_run_that_ends_disconnects_its_ranks(connected: None) -> None:
    trainer: Any = SimpleNamespace(
        callbacks=[], fit=lambda *_, **__: None, strategy=SimpleNamespace(launcher=None)
    )
    callback: Any = SimpleNamespace(data=None, recorder=None)
    run._fit(trainer, None, callback)  # type: ignore[arg-type]
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu", [False, True])
def test_zero_overlaps_only_what_deepspeed_can(stage: int, gpu: bool) -> None:
    options = [*TWO, "trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}"]
    config = load_run_config("run/demo.yaml", [*options, "trainer.offload_optimizer=true"])
    zero = zero_config(config, gpu=gpu)["zero_optimization"]
    # DeepSpeed's engine asserts this of stage 1 where it does not count micro-batches itself.
    assert zero["overlap_comm"] == (gpu and stage > 1)
    assert zero["offload_optimizer"]["pin_memory"] == gpu


@pytest.mark.parametrize(
    ("parameters", "size"), [(1_000, 1_000), (1_001, 1_002), (10**9, 200_000_000)]
)
def test_buckets_are_no_larger_than_the_model(parameters: int, size: int) -> None:
    assert bucket_sizes(parameters) == {"reduce_bucket_size": size, "allgather_bucket_size": size}


def test_zero_gets_buckets_for_the_trained_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def initialize(**options: Any) -> tuple[Any, ...]:
        given.update(options)
        return None, None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(deepspeed, "broadcast_weights", lambda model: None)
    this: Any = SimpleNamespace(
        root_device=torch.device("cpu"), config={"zero_optimization": {"stage": 2}}
    )
    model = torch.nn.Linear(4, 6)
    model.bias.requires_grad_(False)
    optimizer: Any = SimpleNamespace(param_groups=2 * [{"kind": "adam"}])
    DeepSpeedZero._setup_model_and_optimizer(this, model, optimizer)
    assert this._moments == ("exp_avg", "exp_avg_sq")
    assert given["config"]["zero_optimization"] == {"stage": 2, **bucket_sizes(24)}


def test_zero_finds_its_device_in_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Slurm task that sees its own GPU alone, it is the first, whatever the local rank."""
    monkeypatch.setenv("LOCAL_RANK", "none yet")
    environment = SimpleNamespace(main_address="127.0.0.1", main_port=1)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    strategy: Any = object.__new__(DeepSpeedZero)
    strategy._gpu = True
    strategy.cluster_environment = SimpleNamespace(
        **vars(environment), global_rank=lambda: 3, local_rank=lambda: 3, world_size=lambda: 8
    )
    strategy._parallel_devices = [torch.device("cuda", 0)] * 8
    strategy._set_node_environment_variables()
    assert deepspeed.os.environ["LOCAL_RANK"] == "0"


def test_every_save_of_zero_has_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store keeps a page-locked copy of each, and would make it anew for another tensor."""
    utils: Any = SimpleNamespace(
        safe_get_full_fp32_param=lambda parameter: parameter.detach().clone(),
        safe_get_full_optimizer_state=None,
    )
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    strategy: Any = SimpleNamespace(zero_stage_3=False, world_size=1, global_rank=0, _kept={})
    strategy._whole = partial(DeepSpeedZero._whole, strategy)
    model: Any = torch.nn.Linear(2, 2)
    optimizer: Any = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    first = DeepSpeedZero.tensors(strategy, model, optimizer)
    with torch.no_grad():
        model.weight.add_(1)
    second = DeepSpeedZero.tensors(strategy, model, optimizer)
    assert torch.equal(second["model/weight"], model.weight)
    assert [one.data_ptr() for one in first.values()] == [one.data_ptr() for one in second.values()]
