"""The checks of the kernels: outputs and gradients against float64, and out-of-bounds accesses."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from longhaul.kernels.backend import own_backend
from longhaul.kernels.ops import OPS
from longhaul.kernels.verify.cases import DTYPES, Case, check
from longhaul.pipeline.verification.check import Check, Needs, Place

_SANITIZER = "compute-sanitizer"
_STATUS_OF_FINDINGS = 86
# Without PyTorch's allocator, whose large blocks would hide what reads past a tensor.
_PLAIN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_SANITIZED = """
import sys, torch
from longhaul.kernels.power.verify import catalogue
case = next(one for one in catalogue.feature_cases("bfloat16") if one.name == sys.argv[1])
device = torch.device("cuda")
inputs = case.inputs(device)
for form in case.forms:
    case.run(inputs, case.torch_dtype, form=form, backend="triton")
torch.cuda.synchronize()
"""
_SANITIZED_CASES = ("packed, without states", "64 short documents, with states")

# Sizes at which a CPU, which checks the torch backend, takes a fraction of a second.
_CPU_TOKENS, _CPU_WIDTH = 72, 16


def headline_checks(device: str) -> list[Check]:
    return _checks([case for op in OPS for case in op.headline], device)


def training_dtype_checks(device: str) -> list[Check]:
    """Every feature in bfloat16, the other kernels, and the extremes."""
    backend = own_backend(torch.device(device))
    cases = [case for op in OPS for case in op.features("bfloat16")]
    cases += [case for op in OPS for case in op.extremes(backend)]
    return _checks(cases, device)


def candidate_checks(device: str) -> list[Check]:
    """Every feature again, with every other configuration of the kernels."""
    return _checks([case for op in OPS for case in op.candidates], device, Needs(gpu=True))


def remaining_checks(device: str) -> list[Check]:
    """The other dtypes, long sequences, and accesses out of bounds."""
    features = [case for dtype in DTYPES[1:] for op in OPS for case in op.features(dtype)]
    long = [case for op in OPS for case in op.long]
    return [
        *_checks(features, device),
        *_checks(long, device, Needs(gpu=True), seconds=280),
        *(
            Check(
                part="kernels",
                name=f"accesses out of bounds: {name}",
                function=check_accesses,
                argument=name,
                seconds=300,
                gigabytes=2,
                needs=Needs(gpu=True, programs=(_SANITIZER,)),
            )
            for name in _SANITIZED_CASES
        ),
    ]


def peer_checks(device: str) -> list[Check]:
    """Other projects' kernels that an op may be asked to run."""
    return [
        replace(check, is_ours=False)
        for op in OPS
        for package, cases in op.peers.items()
        for check in _checks(cases, device, Needs(gpu=True, packages=(package,)), seconds=280)
    ]


def _checks(
    cases: Sequence[Case], device: str, needs: Needs | None = None, seconds: float = 150
) -> list[Check]:
    needs = Needs() if needs is None else needs
    if device == "cpu" and not needs.gpu:
        cases = [case.shrunk(_CPU_TOKENS, _CPU_WIDTH) for case in cases]
    return [
        Check(
            part="kernels",
            name=f"{case.dtype}: {case.name}",
            function=check_case,
            argument=case,
            seconds=seconds,
            is_alone=False,
            gigabytes=case.gigabytes,
            needs=replace(needs, gpu=needs.gpu or case.needs_gpu),
        )
        for case in cases
    ]


def check_case(case: Case, place: Place) -> dict[str, Any]:
    """Errors of every tensor of a case, in each of its forms. Raises if all of these raise."""
    device = torch.device(place.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # Other processes have the other cores.
    forms: dict[str, dict[str, Any]] = {}
    records = check(case, device, case.backend(device))
    for record in records:
        name = record["form"]
        forms[name] = {key: record.get(key) for key in ("tensors", "seconds", "faults")}
        if "does_not_fit" in record:
            forms[name]["does_not_fit"] = record["does_not_fit"]
    faults = [f"{form}: {fault}" for form, one in forms.items() for fault in one["faults"]]
    if all(record.get("raised") for record in records):
        raise RuntimeError("; ".join(faults))
    return {"case": asdict(case), "forms": forms, "faults": faults}


def check_accesses(name: str, place: Place) -> dict[str, Any]:
    """Run a case where every access to memory is checked."""
    done = subprocess.run(
        [
            _SANITIZER,
            "--tool=memcheck",
            f"--error-exitcode={_STATUS_OF_FINDINGS}",
            "--print-limit=3",
            "--report-api-errors=no",  # PyTorch asks for what a driver may not have.
            *(sys.executable, "-P", "-c", _SANITIZED, name),
        ],
        capture_output=True,
        text=True,
        env=os.environ | _PLAIN_ALLOCATIONS,
        cwd=place.scratch,
    )
    if done.returncode == 0:
        return {"faults": []}
    text = f"{done.stdout}{done.stderr}".strip()
    if "not supported" in text:  # by a driver behind a virtual machine
        return {"faults": [], "not_supported": text[-2000:]}
    return {"faults": [f"{_SANITIZER} ended with {done.returncode}: {text[-2000:]}"]}
