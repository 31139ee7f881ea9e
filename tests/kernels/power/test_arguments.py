"""Arguments of the op that are refused, each with its name, what was found and what was wanted."""

from typing import Any

import pytest
import torch
from power_cases import inputs
from torch import Tensor

from longhaul.kernels import PowerState, power_attention, power_attention_step
from longhaul.kernels.common.offsets import check_offsets

BAD: list[tuple[str, dict[str, Any]]] = [
    ("degree: found 3, wanted the integer 1 or an even", {"degree": 3}),
    (r"degree: found 2\.0, wanted the integer 1 or an even one", {"degree": 2.0}),
    ("degree: found 0", {"degree": 0}),
    ("degree: found True", {"degree": True}),
    ("degree: found '2', wanted the integer", {"degree": "2"}),
    ("scale: found 'a', wanted a finite number", {"scale": "a"}),
    ("scale: found nan", {"scale": float("nan")}),
    ("log_g: found list, wanted a tensor", {"log_g": [0.0]}),
    ("state: found tuple, wanted a PowerState", {"initial_state": (1, 2)}),
    ("cu_seqlens: found 0 dimensions, wanted 1", {"cu_seqlens": torch.tensor(20)}),
    ("chunk_size: found 0", {"chunk_size": 0}),
    ("chunk_size: found 2.5, wanted a whole number from 1 to 2147483647", {"chunk_size": 2.5}),
    ("chunk_size: found 100000000000000000000", {"chunk_size": 10**20}),
    ("normalize: found 'no', wanted True or False", {"normalize": "no"}),
    ("output_final_state: found 1, wanted True or False", {"output_final_state": 1}),
    ("chunk_size: found '4'", {"chunk_size": "4"}),
    ("q: found list, wanted a tensor", {"q": [1.0]}),
    (r"q: found shape \(1, 0, 4, 8\), .* each at least 1", {"q": torch.ones(1, 0, 4, 8)}),
    ("cu_seqlens: found list, wanted a tensor of int32 or int64", {"cu_seqlens": [0, 20]}),
    ("cu_seqlens: found torch.float32", {"cu_seqlens": torch.tensor([0.0, 20.0])}),
    ("form: found 'fused'", {"form": "fused"}),
    ("backend: found 'cuda'", {"backend": "cuda"}),
    ("k: found 3 heads, wanted a divisor of the 4", {"k": torch.ones(1, 20, 3, 8)}),
    (r"k: found shape \(1, 20, 2, 7\)", {"k": torch.ones(1, 20, 2, 7)}),
    (r"v: found shape \(1, 19, 2, 4\)", {"v": torch.ones(1, 19, 2, 4)}),
    ("v: found torch.int64", {"v": torch.ones(1, 20, 2, 4, dtype=torch.int64)}),
    (r"log_g: found shape \(1, 20, 4\)", {"log_g": torch.zeros(1, 20, 4)}),
    (
        "log_g: found torch.bfloat16, wanted float32, also under autocast",
        {"log_g": torch.zeros(1, 20, 2).bfloat16()},
    ),
    ("document 1 from 5 to 5, wanted at least one", {"cu_seqlens": torch.tensor([0, 5, 5, 20])}),
    ("wanted offsets from 0 to 20", {"cu_seqlens": torch.tensor([0, 5, 19])}),
    (
        r"state.kv: found shape \(1, 2, 3, 4\), wanted \(1, 2, 64, 4\)",
        {"initial_state": PowerState(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))},
    ),
    (
        "state.norm: found NoneType, wanted a tensor",
        {"initial_state": PowerState(torch.ones(1, 2, 64, 4), None)},  # type: ignore[arg-type]
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("message", "change"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_named(message: str, change: dict[str, Any]) -> None:
    q, k, v, log_g = (y.float() for y in inputs(20))
    call = {"q": q, "k": k, "v": v, "log_g": log_g} | change
    if "v" in change and "int64" not in message:
        call["k"] = k
    if "k" in change and "3 heads" in message:
        call["v"] = torch.ones(1, 20, 3, 4)
    with pytest.raises(ValueError, match=message):
        power_attention(**call)


@pytest.mark.usefixtures("unchecked")
def test_packing_needs_a_batch_of_one() -> None:
    with pytest.raises(ValueError, match="cu_seqlens: found B = 2"):
        power_attention(*inputs(20, B=2), cu_seqlens=torch.tensor([0, 20]))


@pytest.mark.usefixtures("unchecked")
def test_a_step_takes_one_token() -> None:
    state = PowerState(torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match="q: found 2 tokens, wanted 1"):
        power_attention_step(state, *inputs(2))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["kv", "norm", "q", "log_g"])
def test_a_step_in_place_refuses_tensors_that_need_a_gradient(name: str) -> None:
    token = dict(zip(("q", "k", "v", "log_g"), inputs(1), strict=True))
    state = {"kv": torch.zeros(1, 2, 64, 4).double(), "norm": torch.zeros(1, 2, 64).double()}
    (state | token)[name].requires_grad_()
    with pytest.raises(ValueError, match="inplace: found tensors that need a gradient"):
        power_attention_step(PowerState(**state), **token, inplace=True)


def test_offsets_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    tolist = Tensor.tolist

    def counted(x: Tensor) -> Any:
        nonlocal reads
        reads += 1
        return tolist(x)

    monkeypatch.setattr(Tensor, "tolist", counted)
    offsets = torch.tensor([0, 5, 20])
    for _ in range(3):
        assert check_offsets(offsets, 20) == (0, 5, 20)
    assert reads == 1
    offsets[1] = 7
    assert check_offsets(offsets, 20) == (0, 7, 20)
    with pytest.raises(ValueError, match="wanted offsets from 0 to 21"):
        check_offsets(offsets, 21)
    with torch.inference_mode():
        unversioned = torch.tensor([0, 5, 20])
        assert check_offsets(unversioned, 20) == (0, 5, 20)
        unversioned[1] = 7
        assert check_offsets(unversioned, 20) == (0, 7, 20)
