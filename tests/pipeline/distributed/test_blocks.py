"""What is done to blocks: one compiled graph a kind; bf16 weights but for gates and rates.

And what is computed again in the backward pass, which changes no bit.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longhaul.configs import load_run_config
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.distributed.blocks import Checkpointing, prepare_blocks
from longhaul.pipeline.training import run

COMPILED = Path(__file__).parent / "compiled_blocks.py"
SHAPES = ("softmax/llama", "softmax/gemma", "softmax/post")
GROUPED = tuple(f"{kind}/{shape}" for kind in ("sympow", "complex", "coca")
                for shape in ("grouped", "normed"))  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "num_packed", "kinds"),
    [
        ("eager", 3, ("conformal_sympow", "softmax/gemma")),
        pytest.param("aot_eager", 0, ("conformal_sympow", *SHAPES), marks=pytest.mark.soak),
        pytest.param("aot_eager", 3, GROUPED, marks=pytest.mark.wide),
        pytest.param("aot_eager", 3, ("softmax/light", "deltanet/light"), marks=pytest.mark.wide),
        pytest.param("aot_eager", 50, registered_variants(), marks=pytest.mark.soak),
        pytest.param("aot_eager", 0, registered_variants(), marks=pytest.mark.soak),
        pytest.param("inductor", 0, ("conformal_sympow", *SHAPES), marks=pytest.mark.soak),
        pytest.param("inductor", 50, ("conformal_sympow", "softmax"), marks=pytest.mark.soak),
    ],
)
def test_compiled_blocks_are_one_graph_that_computes_the_same_gradients(
    backend: str, num_packed: int, kinds: tuple[str, ...], fork: Any, tmp_path: Path
) -> None:
    """With `num_packed`, over so many batches whose documents begin elsewhere each time."""
    code = f"import runpy; runpy.run_path({str(COMPILED)!r}, run_name='__main__')"
    process = fork(code, tmp_path, backend, str(num_packed), *kinds)
    out, error = process.communicate(timeout=300)  # every kind, fifty times
    assert process.returncode == 0, error
    for kind, line in zip(kinds, out.splitlines(), strict=True):
        found = json.loads(line)
        assert found["loss"] < 1e-5, kind
        assert found["gradient"] < 1e-5, kind
        assert found["gradients"] > 10, kind
        # One for all blocks and batches: nothing in them ends a graph, our own ops included.
        assert (found["graphs"], found["breaks"]) == (1, 0), kind
        assert bool(found["compiled"]) == (backend == "inductor"), kind


IN_BF16 = """
import sys
from functools import partial
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.distributed.blocks import prepare_blocks, shard

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
kind = attention_config("conformal_sympow")()
config = LanguageModelConfig(layers=2, width=32, heads=2, vocabulary=64, attention=kind)
model = LanguageModel(config)
backend = sys.argv[2]
if backend != "none":
    torch.compile = partial(torch.compile, backend=backend)
prepare_blocks(model, checkpointing=1, compiled=backend != "none")
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
shard(model, mesh, policy)

def note(attention, linear):
    print(attention.gate.weight.dtype, attention.rate.weight.dtype, linear.weight.dtype)

if backend == "none":
    for block in model.blocks:
        for linear in block.modules():
            if isinstance(linear, torch.nn.Linear):
                linear.register_forward_pre_hook(
                    lambda linear, _, attention=block.attention: note(attention, linear)
                )
tokens = torch.randint(64, (1, 32))
with torch.autocast("cpu", torch.bfloat16):
    loss = model.loss(tokens, tokens)
loss.backward()
assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
print(counters["stats"]["unique_graphs"], "graphs,", sum(counters["graph_break"].values()), "cuts")
dist.destroy_process_group()
"""


def in_bf16(fork: Callable[..., Any], folder: Path, backend: str) -> list[str]:
    process = fork(IN_BF16, folder, str(folder / "meeting"), backend)
    out, error = process.communicate()
    assert process.returncode == 0, error
    return list(out.splitlines())


def test_gates_and_rates_keep_their_bits_where_other_weights_are_bf16(
    tmp_path: Path, fork: Callable[..., Any]
) -> None:
    found = in_bf16(fork, tmp_path, "none")
    # Four projections in two blocks, forward and, as each block is computed again, backward.
    assert found == 16 * ["torch.float32 torch.float32 torch.bfloat16"] + ["0 graphs, 0 cuts"]


def test_a_block_is_one_graph_where_fsdp_gathers_gates_and_rates_in_float32(
    tmp_path: Path, fork: Callable[..., Any]
) -> None:
    assert in_bf16(fork, tmp_path, "aot_eager") == ["1 graphs, 0 cuts"]


# Weights in float32 take the way of bf16, but round nothing.
TWO_RANKS = """
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.distributed.blocks import device_mesh, prepare_blocks, shard
from longhaul.pipeline.distributed.strategies import FSDP2

meeting, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
config = LanguageModelConfig(
    layers=2, width=32, heads=2, vocabulary=64,
    attention=attention_config("conformal_sympow")(),
    layer_attention={"0": attention_config("zeros")(initial_state="learned")},
)
torch.manual_seed(0)
whole = LanguageModel(config)
rows = torch.randint(64, (2, 2, 1, 40))
for row in rows.flatten(0, 1):
    (whole.loss(row, row.roll(1)) / 4).backward()
for replicas in (1, 2):
    sharded = LanguageModel(config)
    sharded.load_state_dict(whole.state_dict())
    prepare_blocks(sharded, checkpointing=2, compiled=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    shard(sharded, device_mesh("cpu", 2, replicas), policy)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    strategy = SimpleNamespace(model=SimpleNamespace(model=sharded))
    for number, (first, second) in enumerate(rows):
        row = (first, second)[rank]
        with FSDP2.accumulating(strategy, is_last=number == 1):
            (sharded.loss(row, row.roll(1)) / 2).backward()
        # Shards of gradients exist after each micro-batch; replicas wait for the last.
        is_complete = replicas == 1 or number == 1
        assert all((weight.grad is not None) == is_complete for weight in sharded.parameters())
    for (name, one), other in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad.full_tensor(), one.grad, rtol=1e-3, atol=1e-6,
            msg=lambda text: f"{replicas} {name} {text}",
        )
dist.destroy_process_group()
"""


def test_gradients_of_two_ranks_with_float32_weights_apart_are_those_of_one_process(
    tmp_path: Path, fork: Callable[..., Any]
) -> None:
    meeting = str(tmp_path / "meeting")
    ranks = [fork(TWO_RANKS, tmp_path, meeting, str(rank)) for rank in range(2)]
    for rank in ranks:
        _, error = rank.communicate()
        assert rank.returncode == 0, error


def test_ddp_does_not_cut_the_graphs_of_compiled_blocks() -> None:
    with torch.device("meta"):
        model = LanguageModel(load_run_config("run/demo.yaml", ["model.layers=1"]).model)
    with torch._dynamo.config.patch(optimize_ddp=True):
        prepare_blocks(model, checkpointing=0, compiled=True)
        assert torch._dynamo.config.optimize_ddp is False


@pytest.mark.parametrize(
    ("settings", "on_gpu", "is_compiled"),
    [
        ([], True, True),
        ([], False, False),
        (["trainer.compile=false"], True, False),
        (["trainer.compile=true"], False, True),
        (["trainer.strategy=fsdp", "trainer.devices=2"], True, True),
        (["trainer.strategy=deepspeed"], True, False),
        (["trainer.strategy=ddp", "trainer.devices=2", "trainer.context_parallel=2"], True, False),
        (["trainer.deterministic=true"], True, False),
        (["trainer.accelerator=cpu"], True, False),
    ],
)
def test_blocks_are_compiled_on_gpus_unless_a_setting_forbids_it(
    settings: list[str], on_gpu: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(
        run, "prepare_blocks", lambda model, *, checkpointing, compiled: found.append(compiled)
    )
    config = load_run_config("run/demo.yaml", ["model.layers=1", *settings])
    run.build_module(config)
    assert found == [is_compiled]


BLOCKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 88},
}
RECOMPUTED = ("conformal_sympow", "softmax", "fox", "gated_deltanet", "mamba2")
PRODUCT = re.compile(
    r"aten\.(mm|addmm|bmm|baddbmm|mv|dot|\w*convolution\w*|_scaled_dot_product\w*)\."
    r"|longhaul\.|higher_order\."
)


def recomputing(kind: str, block: str, checkpointing: Checkpointing) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, **BLOCKS[block]}
    model = LanguageModel(LanguageModelConfig(attention=attention_config(kind)(), **sizes))
    prepare_blocks(model, checkpointing=checkpointing, compiled=False)
    return model


def losses_of_an_update(model: LanguageModel, *, is_mixed: bool) -> list[Tensor]:
    """Those of a micro-batch of whole rows, and of one whose rows hold documents."""
    losses = []
    for share in (0.0, 0.1):
        tokens, target = torch.randint(64, (2, 2, 80))
        is_first = torch.rand(2, 80) < share if share else None
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            losses.append(model.loss(tokens, target, is_first=is_first))
            losses[-1].backward()
    return losses


# Each kind in one of the four ways, and each way with a kind; all pairs in the wide suite.
WAYS = tuple(itertools.product(BLOCKS, (False, True)))


@pytest.mark.parametrize(
    ("kind", "block", "is_mixed"),
    [
        pytest.param(kind, *way, marks=() if way == WAYS[number % 4] else pytest.mark.wide)
        for number, kind in enumerate(RECOMPUTED)
        for way in WAYS
    ],
)
def test_light_changes_no_bit_of_losses_gradients_and_weights(
    kind: str, block: str, is_mixed: bool
) -> None:
    found = []
    modes: tuple[Checkpointing, ...] = (0, "light")
    for mode in modes:
        model = recomputing(kind, block, mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results = []
        for _ in range(2):
            optimizer.zero_grad()
            results += losses_of_an_update(model, is_mixed=is_mixed)
            optimizer.step()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        found.append([*results, *gradients, *model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Calls(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", registered_variants())
def test_light_computes_no_product_and_no_attention_twice(kind: str) -> None:
    counts = []
    modes: tuple[Checkpointing, ...] = (0, "light")
    for mode in modes:
        with Calls() as calls:
            losses_of_an_update(recomputing(kind, "gpt2", mode), is_mixed=True)
        counts.append(calls.count)
    plain, light = ({op: n for op, n in one.items() if PRODUCT.match(op)} for one in counts)
    assert light == plain
    # Two norms in each of two blocks, for two micro-batches.
    norm = "aten.native_layer_norm.default"
    assert counts[1][norm] == counts[0][norm] + 8


class WritesIntoBuffer(torch.nn.Module):
    """exp(x exp(x x)), whose product is written into a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            product = torch.zeros_like(x)
            torch.mm(x, x, out=product)
        return (x * product.exp()).exp()


def test_light_computes_again_what_a_product_writes_into_a_tensor() -> None:
    x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
    (wanted,) = torch.autograd.grad(WritesIntoBuffer()(x).sum(), x)
    model: Any = SimpleNamespace(blocks=[WritesIntoBuffer()])
    prepare_blocks(model, checkpointing="light", compiled=False)
    (found,) = torch.autograd.grad(model.blocks[0](x).sum(), x)
    assert torch.equal(found, wanted)
