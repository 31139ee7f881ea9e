"""The table of accelerators against the names that torch gives them."""

import pytest
import torch

from longhaul.pipeline.system.devices import DEVICES, find_device, peak_flops


@pytest.mark.parametrize(
    ("reported", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_reported_name_finds_its_device(reported: str, key: str) -> None:
    device = find_device(reported)
    assert device is not None
    assert device.key == key
    assert find_device(key) is find_device(key.upper()) is device


@pytest.mark.parametrize(
    ("gres", "key"),
    [
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("nvidia_h100_pcie", "h100-pcie"),
        ("h100_pcie", "h100-pcie"),
        ("nvidia_a100-sxm4-40gb", "a100-40"),
        ("nvidia_a100_80gb_pcie", "a100"),
        ("nvidia_h200", "h200"),
        ("nvidia_l40s", "l40s"),
    ],
)
def test_slurms_name_finds_its_device(gres: str, key: str) -> None:
    device = find_device(gres)
    assert device is not None
    assert device.key == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Tesla V100-SXM2-16GB",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "nvidia_h100_80gb_hbm3_1g.10gb",
    ],
)
def test_other_devices_are_unknown(name: str) -> None:
    assert find_device(name) is None


def test_peaks_are_dense_and_fall_with_precision() -> None:
    assert len({device.key for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        # Sparse peaks are twice the dense ones: TF32 is half of bfloat16 on all of these.
        assert device.tf32_flops == pytest.approx(device.bf16_flops / 2, rel=0.02), device.key
        assert device.fp32_flops < device.tf32_flops


@pytest.mark.skipif(torch.cuda.is_available(), reason="the peak of a known GPU is known")
def test_the_peak_of_a_cpu_is_not_known() -> None:
    # What a product reaches on a shared CPU says little: utilisations came out above 1.
    assert peak_flops("32-true") is None
