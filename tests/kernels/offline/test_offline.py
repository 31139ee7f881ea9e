"""Compiling kernels for absent chips. Tests run this file as a program in a new process, because
kernels may be interpreted under pytest."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="there is no Triton for this platform")

import triton.language as tl  # noqa: E402

CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


@triton.jit
def _double_kernel(x_ptr, y_ptr, T, stride, BLOCK_T: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x = tl.load(x_ptr + t * stride, mask=t < T, other=0.0)
    tl.store(y_ptr + t, 2 * x, mask=t < T)


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, T, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for t in range(0, T, BLOCK):
        a = tl.load(a_ptr + row * T + t + column)
        b = tl.load(b_ptr + (t + row) * BLOCK + column)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + row * BLOCK + column, total.to(c_ptr.dtype.element_ty))


def double(T: int, stride: int) -> None:
    x = torch.zeros(T * stride)
    y = torch.full_like(x, 5)
    _double_kernel[(triton.cdiv(T, 64),)](x, y, T, stride, BLOCK_T=64, num_warps=2)
    assert bool((y == 5).all())


def double_in_three_specialisations() -> None:
    for T, stride in ((64, 1), (128, 1), (65, 1), (64, 3), (64, 3)):
        double(T, stride)


def matmul(**options: Any) -> None:
    a = torch.zeros(128, 512, dtype=torch.bfloat16)
    _matmul_kernel[(1,)](a, a, a, 512, BLOCK=128, **options)


def too_much_shared_memory() -> None:
    a = torch.zeros(128, 2048)
    _matmul_kernel[(1,)](a, a, a, 2048, BLOCK=128, num_warps=8, num_stages=4)


def shape(name: str) -> None:
    from longhaul.kernels.power.verify.shapes import SHAPES

    (found,) = (one for one in SHAPES if one.name == name)
    found.launch()


# Shapes of `make test-all` for each chip; `make soak` compiles all for all chips.
SHAPES_OF = {
    "sm_80": ("chunked p2 K64 V64 bfloat16",),
    "sm_86": ("step p2 K64 V64 bfloat16", "step p2 K64 V64 bfloat16 in place"),
    "sm_89": ("attention p2 K64 V64 bfloat16",),
    "sm_90": (
        "chunked p2 K64 V64 bfloat16",
        "attention p2 K64 V64 bfloat16",
        "step p2 K64 V64 bfloat16 in place",
    ),
    "sm_100": ("attention p2 K64 V64 bfloat16",),
    "sm_120": ("attention p2 K64 V64 bfloat16",),
    "gfx942": ("chunked p2 K64 V64 bfloat16", "step p2 K64 V64 bfloat16 in place"),
}

LAUNCHERS = {
    "double": double_in_three_specialisations,
    "matmul": lambda: matmul(num_warps=8, num_stages=2),
    "spill": lambda: matmul(num_warps=4, num_stages=2, maxnreg=64),
    "too_much_shared_memory": too_much_shared_memory,
    "in place": lambda: shape("step p1 K64 V64 float32 in place"),
    "three candidates": lambda: shape("attention p1 K64 V64 bfloat16 plain"),
}


def program(launcher: str, targets: str) -> None:
    """Print the records of one launcher for some chips, with the faults of each."""
    from longhaul.kernels.offline import recording
    from longhaul.kernels.offline.table import faults

    found = []
    for target in targets.split(","):
        with recording(target) as compiled:
            LAUNCHERS[launcher]()
        found += [
            dataclasses.asdict(kernel)
            | {"folder": str(kernel.folder), "faults": faults(kernel, kernel.kernel)}
            for kernel in compiled
        ]
    print(json.dumps(found))


def table() -> None:
    """Compile these shapes; `python -m longhaul.kernels.offline` takes minutes for all."""
    from longhaul.kernels.offline.table import print_table
    from longhaul.kernels.power.verify.shapes import SHAPES

    found = []
    for target, names in SHAPES_OF.items():
        shapes = {shape.name: shape.launch for shape in SHAPES if shape.name in names}
        found += print_table(shapes, [target], folders=False)
    if found:
        sys.exit("\n".join(found))


def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def records(launcher: str, *targets: str) -> list[dict[str, Any]]:
    done = start(__file__, launcher, ",".join(targets))
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_launch_compiles_once_for_each_specialisation_and_runs_nothing() -> None:
    # Three specialisations: T divisible by 16, T not divisible, stride above one.
    found = records("double", "sm_90")
    assert len({kernel["digest"] for kernel in found}) == len(found) == 3
    for kernel in found:
        assert kernel["kernel"] == "_double_kernel"
        assert kernel["config"] == "warps=2 stages=3 BLOCK_T=64"
        assert kernel["faults"] == []
        assert kernel["products"] == ""


@pytest.mark.wide
def test_matrix_products_use_the_units_of_each_chip() -> None:
    found = {kernel["target"]: kernel for kernel in records("matmul", *CHIPS)}
    units = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}
    for target in CHIPS:
        kernel, unit = found[target], units.get(target, "mma.sync")
        assert kernel["products"].split()[1:] == [unit]
        assert kernel["faults"] == []
        assert 16 < kernel["registers"] <= 512
        assert (kernel["tensor_columns"] > 0) == (target == "sm_100")
        assert kernel["shared_bytes"] >= 128 * 128 * 2
        code = {path.suffix for path in Path(kernel["folder"]).iterdir()}
        assert {".ttir", ".ttgir", ".amdgcn" if target == "gfx942" else ".ptx"} <= code


@pytest.mark.wide
def test_spills_are_counted_and_refused() -> None:
    (kernel,) = records("spill", "sm_80")
    assert kernel["registers"] <= 64
    assert min(kernel[size] for size in ("stack_bytes", "spill_stores", "spill_loads")) > 0
    assert [fault.split(":")[1] for fault in kernel["faults"]] == [" spills"]


@pytest.mark.wide
def test_more_shared_memory_than_the_chip_has_is_refused() -> None:
    (kernel,) = records("too_much_shared_memory", "sm_80")
    assert kernel["shared_bytes"] > 163 * 1024
    assert "the chip has 166912" in kernel["faults"][0]


@pytest.mark.wide
def test_every_candidate_of_a_kernel_is_compiled() -> None:
    found = records("three candidates", "sm_90")
    forward = [x["config"] for x in found if x["kernel"] == "_power_fwd_attention_kernel"]
    assert [x.split(" K=")[0] for x in forward] == [
        "warps=4 stages=3", "warps=8 stages=3", "warps=8 stages=2"
    ]  # fmt: skip


@pytest.mark.wide
def test_a_step_in_place_waits_for_all_loads_of_the_state_before_it_writes() -> None:
    """The compiler loads the norm in two layouts, so that several warps load the same entry."""
    found = records("in place", "sm_90")
    (kernel,) = (one for one in found if one["kernel"] == "_power_fwd_step_kernel")
    (path,) = Path(kernel["folder"]).glob("*.ttgir")
    lines = path.read_text().splitlines()
    loads = [n for n, x in enumerate(lines) if re.search(r"%(kv|norm)(_\d+)? = tt.load", x)]
    stores = [n for n, x in enumerate(lines) if "tt.store" in x]
    barriers = [n for n, x in enumerate(lines) if re.search(r"\b(ttg|gpu)\.barrier\b", x)]
    assert len(loads) == 3
    assert any(max(loads) < n < min(stores) for n in barriers)


@pytest.mark.wide
def test_an_interpreter_is_refused() -> None:
    done = start(__file__, "double", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr.splitlines()[-1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--targets", "sm_90,sm_12"), "found 'sm_12', wanted"),
        (("--only", "degree 3"), "found 'degree 3', wanted"),
    ],
)
def test_bad_options_are_named(option: tuple[str, str], message: str) -> None:
    assert message in start("-m", "longhaul.kernels.offline", *option).stderr


@pytest.mark.wide
def test_kernels_compile_without_spills_and_fit() -> None:
    done = start(__file__, "table")
    print(done.stdout)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_every_shape_compiles_for_every_chip() -> None:
    done = start("-m", "longhaul.kernels.offline")
    print(done.stdout)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    table() if sys.argv[1] == "table" else program(*sys.argv[1:])
