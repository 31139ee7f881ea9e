"""The copy of a model in training that is evaluated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Fork = Callable[..., Any]  # conftest.Command: modules of this folder cannot import each other
Run = Any  # conftest.RunFolder

TWO_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from longhaul.pipeline.distributed.blocks import device_mesh, shard
from longhaul.pipeline.distributed.strategy import Resumable
from longhaul.pipeline.runs import trained_model
from longhaul.pipeline.runs.ranks import Ranks

torch.set_num_threads(1)
rank, folder, checkpoint = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
saved = trained_model.load_trained_model(checkpoint)
wanted = saved.model.state_dict()
del trained_model.SavedCheckpoint  # nothing is read from it below
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
ranks = Ranks(rank, 2, dist.group.WORLD)
cpu = torch.device("cpu")
model = saved.model
whole = {name: tensor.clone() for name, tensor in wanted.items()}
shard(model, device_mesh("cpu", 2, 1), MixedPrecisionPolicy())
assert any(isinstance(tensor, DTensor) for tensor in model.state_dict().values())
copy = trained_model.copy_trained_model(checkpoint, Resumable().whole_weights(model), ranks, cpu)
found = copy.model.state_dict()
assert found.keys() == whole.keys()
for name, tensor in whole.items():
    assert found[name].dtype == tensor.dtype
    assert torch.equal(found[name], tensor), name
assert (copy.step, copy.checksums, copy.config) == (saved.step, saved.checksums, saved.config)
assert not copy.model.training
assert all(p.requires_grad for p in copy.model.parameters())
with torch.no_grad():
    copy.model.embedding.weight.zero_()
assert model.state_dict()["embedding.weight"].full_tensor().any()
print("equal")

# Without memory on one rank all give up, and none waits for it in a collective.
real = torch.empty_like
if rank == 1:
    def full(*arguments, **rest):
        raise RuntimeError("out of memory")
    torch.empty_like = full
try:
    with ranks.together():
        trained_model.copy_trained_model(
            checkpoint, Resumable().whole_weights(model), ranks, cpu
        )
except RuntimeError as error:
    print(error)
torch.empty_like = real
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_shard_a_model_copy_it_without_reading_its_checkpoint(
    uninterrupted: Run, tmp_path: Path, fork: Fork
) -> None:
    checkpoint = uninterrupted.path / "small" / "checkpoints" / "step-000000030"
    ranks = [fork(TWO_RANKS, tmp_path, str(r), str(tmp_path), str(checkpoint)) for r in range(2)]
    for rank, failure in zip(
        ranks, ("rank 1 failed: RuntimeError: out of memory", "out of memory"), strict=True
    ):
        out, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, f"{out}\n{error}"
        assert out.splitlines() == ["equal", failure]
