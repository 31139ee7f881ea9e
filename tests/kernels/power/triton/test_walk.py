"""Programs that walk through sequences, where there are enough of them, in place of two kernels."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from power_cases import Case

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before the import of kernels", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor  # noqa: E402

from longhaul.kernels.common.triton.chunking import cut  # noqa: E402
from longhaul.kernels.common.triton.launch import configuration, operands_of  # noqa: E402
from longhaul.kernels.power.triton.chunked.state import _walks  # noqa: E402
from longhaul.kernels.power.triton.chunked.sums import Sums, Tokens  # noqa: E402
from longhaul.kernels.power.triton.features import tiles_of  # noqa: E402

wide = pytest.mark.wide


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(T=40, B=1, H=4, G=2, K=9), marks=wide),
        Case(T=40, B=2, gates="hard", state="none"),
        pytest.param(Case(T=40, B=1, gates="none", normalize=False), marks=wide),
        pytest.param(Case(T=40, B=1, degree=1, K=140, V=130), marks=wide),
        pytest.param(Case(T=40, B=1, K=9, state="arbitrary", gates="hard"), marks=wide),
    ],
    ids=["two groups", "two sequences", "a sum without gates", "degree 1, wide", "arbitrary"],
)
def test_interpreted_a_walk_gives_the_bits_of_sums_and_scans(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs(torch.float32)
    launched: list[str] = []
    run = GridExecutor.__call__

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.fn.__name__)
        run(kernel, *args, **kwargs)

    results = []
    for candidate, has_walked in ((0, False), (1, True)):
        launched.clear()
        with patch.object(GridExecutor, "__call__", noted), configuration(candidate):
            how = {"form": "chunked", "chunk_size": 16, "backend": "triton"}
            results.append(case.run(inputs, torch.float32, **how))
        assert ("_power_fwd_walk_kernel" in launched) == has_walked
        assert ("_power_fwd_state_kernel" in launched) != has_walked
    two, one = results
    for name, x in two.items():
        if name == "dlog_g":  # products of states and their gradients are added up in other parts
            torch.testing.assert_close(one[name], x, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(one[name], x), name


def walks(
    *, B: int = 1, G: int, K: int = 64, degree: int = 2, is_packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:  # fmt: skip
    x = torch.empty(1 if is_packed else B, 256, G, K, dtype=dtype)
    offsets = torch.arange(0, 257, 256 // B) if is_packed else None
    sums = Sums(
        Tokens(x, x, None, None), None, cut(x.shape[0], 256, 64, offsets, x.device),
        tiles_of(K, degree, x.device, x.dtype), operands_of(x), G, degree,
        factor=1.0, is_reverse=False,
    )  # fmt: skip
    return _walks(sums)


def test_enough_programs_walk() -> None:
    # K 64 has 18 blocks of 128 features.
    assert walks(G=11)
    assert not walks(G=10)
    assert walks(G=6, B=2)
    # 264 run at a time: 288 would need a second turn, of which 24 would use little.
    assert not walks(G=8, B=2)
    assert walks(G=12, B=2)
    # Blocks have 64 features in float32.
    assert walks(G=6, dtype=torch.float32)
    # One document may be as long as all.
    assert not walks(G=6, B=2, is_packed=True)
    assert walks(G=11, B=2, is_packed=True)
    assert not walks(G=64, K=32, degree=4)
    with configuration(0):
        assert not walks(G=11)
    with configuration(1):
        assert walks(G=1)
