"""Compiled kernels, executed; and the emulator itself. Kernels may be interpreted under pytest, so
what is compiled runs in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this platform")

import small_kernels
from catalogue import WIDE, all_runs
from machine import Kernel
from memories import FaultError, GlobalMemory

HERE = Path(__file__).parent
TABLE = HERE.parents[2] / "kernels" / "power" / "executed.md"


def start(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, HERE / program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.wide
def test_what_is_compiled_computes_power_attention() -> None:
    done = start("executing.py", "wide")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(WIDE)


@pytest.mark.soak
def test_every_kernel_is_right_with_every_candidate_on_every_chip(tmp_path: Path) -> None:
    done = start("executing.py", "all", "--table", tmp_path / "table.md")
    assert len(done.stdout.splitlines()) == len(all_runs()), done.stderr
    TABLE.write_text((tmp_path / "table.md").read_text())
    assert done.returncode == 0, done.stderr


def test_runs_have_names_of_their_own() -> None:
    names = [run.name for run in all_runs()]
    assert len(set(names)) == len(names)
    assert set(WIDE) <= set(names)


# -- the emulator itself ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """What became of each planted fault, and what the emulator computed."""
    saved = tmp_path_factory.mktemp("emulator") / "agreed.pt"
    done = start("planting.py", saved)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), torch.load(saved)


@pytest.mark.parametrize(
    ("kernel", "outcome"),
    [
        *((kernel, "right") for kernel in ("product", "product on sm_80", "double", "sum")),
        ("reversing", "right"),
        ("reversing without a barrier", "loads what another stores, with no barrier between"),
        ("missing barriers", "no barrier between"),
        ("missing barriers on sm_80", "no barrier between"),
        ("missing fence", "no fence.proxy.async made visible"),
        ("missing wait for copies", "a cp.async may not have written yet"),
        ("missing wait for products", "a wgmma in flight uses"),
        ("missing wait for one product", "a wgmma in flight uses"),
        ("wrong swizzle", "wrong"),
        ("wrong swizzle on sm_80", "wrong"),
        ("load past the end", "4 bytes at 400 of a tensor of 400 bytes"),
        ("store past the end", "4 bytes at 400 of a tensor of 400 bytes"),
        ("address out of shared memory", "bytes of shared memory"),
        ("stores to one address", "two lanes write different values to one address"),
        ("another candidate", "wrong"),
        ("two programs, one place", "two programs store to one address"),
    ],
)
def test_a_planted_fault_is_caught(
    planted: tuple[dict[str, str], Any], kernel: str, outcome: str
) -> None:
    assert outcome in planted[0][kernel]


def test_the_interpreter_computes_the_same(planted: tuple[Any, dict[str, Any]]) -> None:
    floats, integers = planted[1]["numbers"]
    interpreted = small_kernels.numbers()
    torch.testing.assert_close(floats, interpreted[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(integers, interpreted[1])
    product, _ = small_kernels.product(torch.float32, 16)
    torch.testing.assert_close(planted[1]["product"], product, rtol=1e-5, atol=2e-5)


@pytest.mark.wide
def test_the_interpreter_computes_the_same_power_attention(tmp_path: Path) -> None:
    name = "attention, odd widths, float32, sm_80, candidate 0"
    done = start("executing.py", "all", "--only", name, "--save", tmp_path / "results.pt")
    assert done.returncode == 0, done.stderr
    (run,) = (run for run in all_runs() if run.name == name)
    inputs = run.case.inputs(torch.device("cpu"))
    interpreted = run.case.run(inputs, torch.float32, form=run.form, backend="triton")
    for key, x in torch.load(tmp_path / "results.pt").items():
        error = (x - interpreted[key]).norm() / interpreted[key].norm()
        assert error < 1e-5, key


# Program i stores the sum of the numbers below i: a loop of i steps.
LOOP = """
.visible .entry loop(
	.param .u64 .ptr .global .align 1 loop_param_0
)
.reqntid 32
{
	.reg .pred 	%p<3>;
	mov.u32 	%r1, %ctaid.x;
	ld.param.b64 	%rd1, [loop_param_0];
	mov.b32 	%r2, 0;
	mov.b32 	%r3, 0;
	setp.eq.b32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_2;
$L__BB0_1:
	add.s32 	%r3, %r3, %r2;
	add.s32 	%r2, %r2, 1;
	setp.lt.s32 	%p1, %r2, %r1;
	@%p1 bra 	$L__BB0_1;
$L__BB0_2:
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	mov.u32 	%r4, %tid.x;
	setp.eq.b32 	%p2, %r4, 0;
	@%p2 st.global.b32 [ %rd3 + 0 ], { %r3 };
	ret;
}
"""


def run_loop(text: str, num_programs: int, out: torch.Tensor) -> None:
    memory = GlobalMemory()
    pointer = memory.pointer(out)
    memory.copy_in()
    Kernel(text, 0).run(memory, [pointer], (num_programs, 1, 1))
    memory.copy_out()


def test_programs_part_in_loops_and_meet_again() -> None:
    out = torch.zeros(6, dtype=torch.int32)
    run_loop(LOOP, 6, out)
    assert out.tolist() == [0, 0, 1, 3, 6, 10]


def test_a_fault_names_kernel_place_and_instruction() -> None:
    with pytest.raises(
        FaultError, match=r"loop: 4 bytes at 24 of a tensor of 24 bytes .*st\.global"
    ):
        run_loop(LOOP, 7, torch.zeros(6, dtype=torch.int32))


def test_an_instruction_that_is_not_emulated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 15, 'popc\.b32 .*not known to the emulator"):
        run_loop(
            LOOP.replace("add.s32 \t%r3, %r3, %r2;", "popc.b32 \t%r3, %r2;"), 1, torch.zeros(1)
        )
