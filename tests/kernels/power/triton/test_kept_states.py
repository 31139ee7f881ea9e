"""States that the forward pass keeps for the backward pass, where they are small enough."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import logsigmoid
from triton.runtime.interpreter import GridExecutor

from longhaul.kernels import PowerState, power_attention, state_features
from longhaul.kernels.offline import skipping
from longhaul.kernels.power import cost, library, op

T, H, G, K, V = 40, 4, 2, 8, 16


def gradients(keep: bool, **settings: Any) -> tuple[list[Tensor], bool]:
    """Gradients of one call, and whether its backward pass got states."""
    torch.manual_seed(0)
    settings = {"chunk_size": 16, "normalize": True, "is_continued": False} | settings
    q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, G, K), torch.randn(1, T, G, V)
    log_g = logsigmoid(torch.randn(1, T, G) + 3)
    offsets = settings.get("cu_seqlens")
    state = None
    if settings.pop("is_continued"):
        S, P = 1 if offsets is None else len(offsets) - 1, state_features(K, 2)
        state = PowerState(torch.randn(S, G, P, V), torch.rand(S, G, P))
    leaves = [x.requires_grad_() for x in (q, k, v, log_g, *(state or ()))]
    got_states = []
    restore = library.saved_of

    def watched(*args: Any) -> Any:
        saved = restore(*args)
        got_states.append(saved.chunk_kv is not None)
        return saved

    with (
        patch.object(op, "_keeps_states", lambda *_: keep),
        patch.object(library, "saved_of", watched),
    ):
        out, _ = power_attention(
            *leaves[:4], initial_state=state, form="chunked", backend="triton", **settings
        )
        found = torch.autograd.grad(out.square().sum(), leaves)
    return list(found), got_states == [True]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"is_continued": True, "cu_seqlens": torch.tensor([0, 1, 23, T])},
            id="packed, continued",
            marks=pytest.mark.wide,
        ),
        pytest.param({"normalize": False}, id="not normalised", marks=pytest.mark.wide),
    ],
)
def test_kept_states_change_no_gradient(settings: dict[str, Any]) -> None:
    kept, got_states = gradients(True, **settings)
    assert got_states
    computed, got_states = gradients(False, **settings)
    assert not got_states
    for one, other in zip(kept, computed, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_without_gradients_or_for_a_single_chunk() -> None:
    assert not gradients(True, chunk_size=T)[1]
    q = torch.randn(1, T, H, K, requires_grad=True)
    with (
        torch.no_grad(),
        patch.object(library, "power_forward", wraps=library.power_forward) as run,
    ):
        power_attention(q, q, q, form="chunked", chunk_size=16, backend="triton")
    assert run.call_args.kwargs["keeps_states"] is False


def test_states_are_kept_where_they_are_no_larger_than_the_tokens() -> None:
    # 2,304 features of 64 values and a float32 norm, against 256 numbers a token, in bfloat16.
    smallest = 2304 * (64 * 2 + 4) // (256 * 2)
    sizes = {"token_bytes": 2, "state_bytes": 2}
    assert cost.keeps_states(smallest, 1, 64, 64, 2, **sizes)
    assert not cost.keeps_states(smallest - 1, 1, 64, 64, 2, **sizes)
    # Of packed documents each has a chunk of its own, however short it is.
    assert cost.num_chunks(1, T, 16, 4) == T // 16 + 4
    assert cost.num_chunks(2, T, 16, None) == 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fake_states_are_as_the_kernels_make_them(dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(1, T, h, n, dtype=dtype) for h, n in ((H, K), (G, K), (G, V)))
    settings = {
        "degree": 2, "scale": 1.0, "normalize": True, "output_final_state": False,
        "form": "chunked", "chunk_size": 16, "keeps_states": True, "backend": "triton",
    }  # fmt: skip
    with skipping("sm_90"):
        real = library.power_forward(q, k, v, None, None, None, None, **settings)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        found = library.power_forward(*fakes, None, None, None, None, **settings)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in real]


@pytest.mark.wide
def test_a_training_step_launches_few_kernels() -> None:
    """Short calls wait for their starting. Half of the heads at a time need twice as many."""
    launched = []
    run = GridExecutor.__call__

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.fn.__name__)
        run(kernel, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", counted):
        gradients(keep=True)
        assert len(launched) == 15
        launched.clear()
        gradients(keep=False)
        assert len(launched) == 31
