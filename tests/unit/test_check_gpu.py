# SPDX-License-Identifier: Apache-2.0
"""What is said of drivers, GPUs and kernels; without a GPU nothing of them is called ok."""

import pytest
import torch

from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import gpu, subjects
from flashrl_verl.tools.check.devices import Gpu
from flashrl_verl.tools.check.findings import Verdict

FORMATS = [Precision.INT8, Precision.FP8]
OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
GIB = 2**30


def only(findings):
    [finding] = findings
    return finding


def card(index: int = 0, name: str = "NVIDIA H200", capability: int = 90, free: float = 140) -> Gpu:
    return Gpu(index=index, name=name, capability=capability, free_bytes=int(free * GIB), total_bytes=141 * GIB)


@pytest.mark.parametrize(
    ("devices", "driver", "built", "verdict"),
    [
        (0, None, None, SKIPPED),
        (8, (13, 0), None, WARN),  # a CPU build beside GPUs
        (8, None, (13, 0), FAIL),
        (8, (12, 4), (13, 0), FAIL),
        (8, (12, 4), (12, 9), OK),  # minor versions are compatible
        (8, (13, 0), (13, 0), OK),
        (8, (13, 0), (12, 8), OK),
    ],
)
def test_a_driver_runs_no_newer_major_version_of_cuda(devices, driver, built, verdict):
    finding = only(gpu.check_driver(devices, driver, built))
    assert (finding.name, finding.verdict) == (subjects.DRIVER, verdict)


def test_memory_that_something_else_holds_is_told_with_the_gpu():
    assert only(gpu.check_device("cuda", [card(0), card(1)])).verdict is OK
    finding = only(gpu.check_device("cuda", [card(0), card(1, free=100)]))
    assert finding.verdict is WARN and "GPU 1: 100 of 141 GiB" in finding.text and "nvidia-smi" in finding.remedy


def test_gpus_of_two_kinds_are_told():
    finding = only(gpu.check_device("cuda", [card(0), card(1, name="NVIDIA A100", capability=80)]))
    assert finding.verdict is WARN and "A100" in finding.text


def test_on_a_cpu_no_gpu_is_called_ok():
    device = only(gpu.check_device("cpu", []))
    assert device.verdict is OK and "no GPU was looked at" in device.text
    assert only(gpu.check_row_kernel([Precision.INT8], [])).verdict is SKIPPED


@pytest.mark.parametrize(
    ("precision", "device", "capabilities", "verdict", "words"),
    [
        ("int8", "cpu", [], OK, "onednn"),
        ("fp8", "cpu", [], OK, "emulated"),
        ("bf16", "cuda", [70], OK, "nothing is quantized"),
        ("int8", "cuda", [90, 90], OK, "cutlass for linear layers, triton"),
        ("int8", "cuda", [100], OK, "triton for linear"),
        ("fp8", "cuda", [80], FAIL, "at least 8.9"),
        ("fp8", "cuda", [90, 80], FAIL, "8.0"),  # one of them is enough
        ("int8", "cuda", [70], FAIL, "7.0"),
    ],
)
def test_the_kernel_of_a_precision_is_named_or_its_absence_with_another_precision(
    precision, device, capabilities, verdict, words
):
    finding = only(gpu.check_kernel(Precision(precision), device, capabilities))
    assert finding.verdict is verdict and words in finding.text
    assert verdict is OK or "flashrl.precision=" in finding.remedy


def test_no_device_is_a_failure_with_vllms_words():
    finding = gpu.no_device(RuntimeError("Found no NVIDIA driver on your system."))
    assert finding.verdict is FAIL and "no NVIDIA driver" in finding.text and "nvidia-smi" in finding.remedy


@pytest.mark.gpu
@pytest.mark.parametrize("precision", FORMATS)
def test_the_row_kernel_of_this_gpu_is_bit_exact(precision):
    from flashrl_verl.tools.check.devices import cuda_gpus

    assert only(gpu.check_row_kernel([precision], cuda_gpus())).verdict is OK


@pytest.mark.parametrize("precision", FORMATS)
def test_codes_and_scales_of_whole_rows_and_of_a_ranks_columns_are_compared(monkeypatch, precision):
    """On a CPU, where torch's ops write them: what is compared is right, and one wrong scale or code is seen."""
    fmt, cpu, quantize = weight_format(precision), torch.device("cpu"), gpu.quantize_rows_into
    assert gpu._same_codes(fmt, cpu)

    def wrong(change):
        def quantize_wrongly(weight, codes, scales, fmt, first):
            quantize(weight, codes, scales, fmt, first)
            change(codes, scales, first)

        monkeypatch.setattr(gpu, "quantize_rows_into", quantize_wrongly)
        return not gpu._same_codes(fmt, cpu)

    assert wrong(lambda codes, scales, first: scales[-1, -1].mul_(1.0001))
    assert wrong(lambda codes, scales, first: as_bytes(codes)[-1, -1].bitwise_xor_(1))
    assert wrong(lambda codes, scales, first: scales.copy_(scales.flip(0)))
    assert wrong(lambda codes, scales, first: first and as_bytes(codes)[0, 0].bitwise_xor_(1)), "a rank's columns"
