"""Whether there are GPUs, and memory and peak FLOP/s of accelerators, as published by vendors."""

import re
from dataclasses import dataclass

import torch

from longhaul.configs import ConfigError

# The name of a MIG slice of a GPU, such as 1g.10gb, which has neither the GPU's memory nor its
# speed.
_MIG_SLICE = re.compile(r"\b\d+g\.\d+gb")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A model of accelerator. Peaks are for dense matrix products, without sparsity, in FLOP/s."""

    key: str  # as `longhaul plan --device` takes it
    name: str
    memory_bytes: int  # from the vendor's decimal GB; the real memory is a few percent more
    bf16_flops: float
    tf32_flops: float
    fp32_flops: float  # of the vector units, without tensor cores
    reported: tuple[str, ...]  # substrings, all of which torch.cuda.get_device_name() contains


# If several match a reported name, the first is taken. Sources, with values halved where they are
# stated "with sparsity": NVIDIA's data sheets of A100, H100, H200, L40S and the Blackwell
# architecture brief (B200), AMD's data sheet of the Instinct MI300X.
DEVICES = (
    Device(
        key="h200", name="NVIDIA H200", memory_bytes=141 * 10**9,
        bf16_flops=989e12, tf32_flops=494e12, fp32_flops=67e12, reported=("NVIDIA H200",),
    ),
    Device(
        key="h100-pcie", name="NVIDIA H100 PCIe", memory_bytes=80 * 10**9,
        bf16_flops=756e12, tf32_flops=378e12, fp32_flops=51e12, reported=("H100", "PCIe"),
    ),
    Device(
        key="h100", name="NVIDIA H100 SXM", memory_bytes=80 * 10**9,
        bf16_flops=989e12, tf32_flops=494e12, fp32_flops=67e12, reported=("H100", "80GB"),
    ),
    Device(
        key="a100", name="NVIDIA A100 80 GB", memory_bytes=80 * 10**9,
        bf16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, reported=("A100", "80GB"),
    ),
    Device(
        key="a100-40", name="NVIDIA A100 40 GB", memory_bytes=40 * 10**9,
        bf16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, reported=("A100", "40GB"),
    ),
    Device(
        key="b200", name="NVIDIA B200", memory_bytes=180 * 10**9,
        bf16_flops=2.25e15, tf32_flops=1.125e15, fp32_flops=75e12, reported=("NVIDIA B200",),
    ),
    Device(
        key="l40s", name="NVIDIA L40S", memory_bytes=48 * 10**9,
        bf16_flops=362e12, tf32_flops=183e12, fp32_flops=91.6e12, reported=("L40S",),
    ),
    Device(
        key="mi300x", name="AMD Instinct MI300X", memory_bytes=192 * 10**9,
        bf16_flops=1307e12, tf32_flops=653.7e12, fp32_flops=163.4e12, reported=("MI300X",),
    ),
)  # fmt: skip


def uses_gpu(accelerator: str) -> bool:
    """Whether a run trains on GPUs here.

    Args:
        accelerator: a value of trainer.accelerator.

    Raises:
        ConfigError: it asks for GPUs, and there is none.
    """
    if accelerator == "cpu":
        return False
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator: found gpu where torch {torch.__version__} finds no GPU, wanted "
            "auto or cpu to train on CPUs; `longhaul doctor` says what is missing"
        )
    return torch.cuda.is_available()


def find_device(name: str) -> Device | None:
    """The device with this name, None if it is unknown.

    Args:
        name: a key such as h100, the name that torch reports, or Slurm's name, which is torch's in
            lower case with underscores: nvidia_h100_80gb_hbm3.
    """
    plain = _plain(name)
    if _MIG_SLICE.search(plain):
        return None
    by_key = (device for device in DEVICES if _plain(device.key) == plain)
    by_name = (
        device for device in DEVICES if all(_plain(part) in plain for part in device.reported)
    )
    return next(by_key, None) or next(by_name, None)


def _plain(name: str) -> str:
    return re.sub("[_-]", " ", name.lower())


def peak_flops(precision: str) -> float | None:
    """Peak FLOP/s of this process's device, None if it is unknown, as that of a CPU is.

    Args:
        precision: a value of trainer.precision.
    """
    if not torch.cuda.is_available():
        return None
    device = find_device(torch.cuda.get_device_name())
    if device is None:
        return None
    if precision == "bf16-mixed":
        return device.bf16_flops
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return device.fp32_flops if is_exact else device.tf32_flops
