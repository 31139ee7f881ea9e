"""Every load and store of the kernels lies in a tensor that the kernel was given.

The interpreter reads any address without a word, as a GPU mostly does. Here it looks first.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_leaves

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.testing import assert_close

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before the import of kernels", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder  # noqa: E402

from longhaul.kernels.common.triton.chunking import cut  # noqa: E402
from longhaul.kernels.common.triton.launch import configuration, operands_of  # noqa: E402
from longhaul.kernels.power.triton.chunked import forward  # noqa: E402
from longhaul.kernels.power.triton.chunked.sums import Sums, Tokens, chunk_sums  # noqa: E402
from longhaul.kernels.power.triton.features import tiles_of  # noqa: E402

T, H, G, K, V = 40, 2, 1, 5, 3
OFFSETS = (0, 1, 17, 40)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Raise IndexError for an access outside of the launch's tensors; count the accesses."""
    ranges: list[tuple[int, int]] = []
    count = [0]
    prepare = GridExecutor._init_args_hst
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(self: Any, args: Any, kwargs: Any) -> Any:
        found = prepare(self, args, kwargs)
        storages = [x.untyped_storage() for x in tree_leaves(found) if isinstance(x, Tensor)]
        ranges[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        return found

    def look(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        address = pointers.data.astype(np.int64)[mask.data.astype(bool)]
        is_inside = np.zeros(address.shape, bool)
        for low, high in ranges:
            is_inside |= (address >= low) & (address + max(size, 1) <= high)
        count[0] += address.size
        if not is_inside.all():
            raise IndexError(f"{(~is_inside).sum()} of {address.size} addresses in no tensor")

    def looking_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        look(pointers, mask)
        return load(self, pointers, mask, *rest)

    def looking_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "_init_args_hst", note)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", looking_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", looking_store)
    yield count
    assert count[0] > 0


def run(*, is_packed: bool, has_state: bool, **how: Any) -> dict[str, Tensor]:
    """Outputs and all gradients of a gated, normalised call."""
    torch.manual_seed(0)
    S, P = len(OFFSETS) - 1 if is_packed else 1, state_features(K, how["degree"])
    q, k, v = torch.rand(1, T, H, K), torch.rand(1, T, G, K), torch.randn(1, T, G, V)
    inputs = {"q": q, "k": k, "v": v, "log_g": logsigmoid(torch.randn(1, T, G) + 2)}
    if has_state:
        # A state that keys could have left: its sums with the features of any query are positive.
        inputs |= {"kv": torch.rand(S, G, P, V), "norm": torch.rand(S, G, P)}
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out, after = power_attention(
        *(leaves[name] for name in ("q", "k", "v", "log_g")),
        initial_state=PowerState(leaves["kv"], leaves["norm"]) if has_state else None,
        output_final_state=has_state,
        cu_seqlens=torch.tensor(OFFSETS) if is_packed else None,
        **how,
    )
    results = {"out": out} | ({} if after is None else {"kv": after.kv, "norm": after.norm})
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in results.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return results | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


def check(**how: Any) -> None:
    actual = run(**how, backend="triton")
    wanted = run(**how, backend="torch")
    for name, x in wanted.items():
        assert_close(actual[name], x.double(), x, multiple=200.0, name=name)


wide = pytest.mark.wide


@pytest.mark.parametrize(
    ("form", "is_packed", "has_state", "degree"),
    [
        ("attention", True, False, 2),
        pytest.param("attention", False, False, 2, marks=wide),
        pytest.param("attention", True, False, 8, marks=wide),
        ("chunked", True, True, 2),
        pytest.param("chunked", True, False, 1, marks=wide),
        pytest.param("chunked", False, False, 4, marks=wide),
    ],
)
def test_every_access_is_inside_a_tensor(
    form: str, is_packed: bool, has_state: bool, degree: int
) -> None:
    check(form=form, is_packed=is_packed, has_state=has_state, degree=degree, chunk_size=16)


def test_every_access_of_a_walk_is_inside_a_tensor() -> None:
    with configuration(1):
        check(form="chunked", is_packed=True, has_state=True, degree=2, chunk_size=16)


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=wide), pytest.param(4, marks=wide)])
def test_every_access_of_a_step_is_inside_a_tensor(degree: int) -> None:
    P = state_features(K, degree)
    state = PowerState(torch.rand(2, G, P, 17), torch.rand(2, G, P))
    q, k, v = torch.rand(2, 1, H, K), torch.rand(2, 1, G, K), torch.rand(2, 1, G, 17)
    for inplace in (False, True):
        power_attention_step(state, q, k, v, degree=degree, inplace=inplace, backend="triton")


def test_with_states_the_attention_form_has_chunks_as_long_as_the_longest_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer ones would have empty programs, most of all for many short documents."""
    sizes = []

    def cut(B: int, T: int, size: int, *rest: Any) -> Any:
        sizes.append(size)
        return original(B, T, size, *rest)

    original = forward.cut
    monkeypatch.setattr(forward, "cut", cut)
    check(form="attention", is_packed=True, has_state=True, degree=1)
    assert set(sizes) == {max(end - start for start, end in pairwise(OFFSETS))}


@pytest.mark.parametrize("is_reverse", [False, True])
def test_sums_of_chunks_that_nothing_reads_are_not_computed(is_reverse: bool) -> None:
    """The last chunk of a document, unless a final state is wanted; in reverse the first."""
    x, y = torch.rand(1, T, G, K), torch.rand(1, T, G, V)
    offsets = torch.tensor(OFFSETS)
    chunks = cut(1, T, 8, offsets, x.device)
    tiles = tiles_of(K, 2, x.device, x.dtype)

    def is_computed(*, needs_all: bool) -> list[bool]:
        sums = Sums(
            Tokens(x, y, None, None), None, chunks, tiles, operands_of(x), G, 2,
            factor=1.0, is_reverse=is_reverse,
        )  # fmt: skip
        kv, _ = chunk_sums(sums, has_norm=False, needs_all=needs_all)
        # The tests fill uninitialised memory with NaN.
        return [bool(one.isfinite().all()) for one in kv]

    # Documents of 1, 16 and 23 tokens have 1, 2 and 3 chunks; the table has two rows more.
    assert is_computed(needs_all=True) == [True] * 6 + [False] * 2
    ends = [False, True, False, True, True, False]
    starts = [False, False, True, False, True, True]
    assert is_computed(needs_all=False) == (starts if is_reverse else ends) + [False] * 2
