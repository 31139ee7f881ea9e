"""Which configuration of a kernel a launch runs: a fixed one for each chip."""

from threading import Thread
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="there is no Triton for this platform")

from longhaul.kernels.common.triton import launch as launching  # noqa: E402
from longhaul.kernels.common.triton.chunking import _cut_rows  # noqa: E402
from longhaul.kernels.common.triton.launch import (  # noqa: E402
    candidates,
    chip_of,
    config,
    configuration,
    launch,
    operands_of,
)
from longhaul.kernels.power.triton.attention.forward import _rows_longest_first  # noqa: E402
from longhaul.kernels.power.triton.features import slots_of, tiles_of  # noqa: E402
from longhaul.kernels.power.triton.tile_sizes import (  # noqa: E402
    MOST_CANDIDATES,
    choices,
    every_candidates,
)

TWO = candidates(config(4, 1, BLOCK_T=16), config(8, 2, BLOCK_T=32), sm_90=1)
CPU = torch.device("cpu")


class Kernel:
    """A kernel that records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, BLOCK_T: int, num_warps: int, num_stages: int, **_: Any) -> None:
            self.launches.append((grid, BLOCK_T, num_warps, num_stages, *args))

        return run


def launched(threaded: bool = False) -> tuple[Any, ...]:
    kernel = Kernel()

    def run() -> None:
        launch(kernel, lambda meta: (64 // meta["BLOCK_T"],), TWO, 5)

    if threaded:
        thread = Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    (found,) = kernel.launches
    return found


FIRST, SECOND = ((4,), 16, 4, 1, 5), ((2,), 32, 8, 2, 5)


def test_the_chip_alone_chooses_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for chip, wanted in (("sm_80", FIRST), ("sm_90", SECOND), ("gfx942", FIRST), ("sm_90", SECOND)):
        monkeypatch.setattr(launching, "chip", lambda chip=chip: chip)
        assert launched() == wanted


def test_a_forced_configuration_holds_in_all_threads_until_it_ends() -> None:
    with configuration(1):
        assert launched() == launched(threaded=True) == SECOND
        with configuration(0):
            assert launched() == FIRST
        assert launched() == SECOND
    assert launched() == launched(threaded=True) == FIRST
    with configuration(7):  # a kernel with fewer candidates runs its last
        assert launched() == SECOND


def test_every_kernel_has_a_choice_on_every_chip() -> None:
    for chip in ("sm_80", "sm_90", "gfx942", "unknown"):
        assert choices(chip).keys() == every_candidates().keys()
    counts = {name: len(one.configs) for name, one in every_candidates().items()}
    assert max(counts.values()) == MOST_CANDIDATES
    assert counts["attention, bfloat16, K and V up to 64"] == 3
    assert {
        "sums of chunks, narrow",
        "read-out, wide",
        "query gradient, float32",
        "states of a sequence, narrow",
    } <= counts.keys()


def test_a_gpu_is_named_as_triton_names_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(**found: Any) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), found))

    properties(major=12, minor=0)
    assert chip_of(torch.device("cuda", 0)) == "sm_120"
    properties(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chip_of(torch.device("cuda", 0)) == "gfx942"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amd_has_no_tf32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(launching, "chip", lambda: "gfx942")
    assert operands_of(torch.empty(1, dtype=dtype)).precision == "ieee"
    monkeypatch.setattr(launching, "chip", lambda: "sm_90")
    assert operands_of(torch.empty(1, dtype=dtype)).precision.startswith("tf32")


def test_tables_are_kept_however_many_calls_differ() -> None:
    """A captured CUDA graph reads the tables of its capture at each replay."""
    captured = (
        _cut_rows(2, 1000, 64, CPU).table,
        _rows_longest_first(2, 1000, 64, CPU).table,
        tiles_of(8, 2, CPU, torch.float32).table,
        slots_of(8, 2, CPU, 1, True).table,
    )
    for n in range(1, 100):
        _cut_rows(2, n, 64, CPU)
        _rows_longest_first(2, n, 64, CPU)
        tiles_of(n, 1, CPU, torch.float32)
        slots_of(n, 1, CPU, 1, True)
    replayed = (
        _cut_rows(2, 1000, 64, CPU).table,
        _rows_longest_first(2, 1000, 64, CPU).table,
        tiles_of(8, 2, CPU, torch.float32).table,
        slots_of(8, 2, CPU, 1, True).table,
    )
    assert all(x is y for x, y in zip(captured, replayed, strict=True))


def test_rows_are_cut_into_chunks_in_order() -> None:
    table, sequences, size, _ = _cut_rows(2, 5, 2, CPU)
    assert table.tolist() == [
        [b, b, start, min(start + 2, 5), 0, 5] for b in (0, 1) for start in (0, 2, 4)
    ]
    assert (sequences.tolist(), size) == ([[0, 3], [3, 3]], 2)
    starts = _rows_longest_first(2, 5, 2, CPU).table[:, 2].tolist()
    assert starts == [4, 4, 2, 2, 0, 0]
