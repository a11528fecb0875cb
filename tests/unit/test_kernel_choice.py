# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies a format on which device, and what a device without one is told."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats import Kernel, fp8, fp8_block, int8
from flashrl_verl.quantization.gemm import choose_kernel


@pytest.mark.parametrize(
    "fmt, device, capability, linear",
    [
        (int8.FORMAT, "cuda", 75, Kernel.CUTLASS),
        (int8.FORMAT, "cuda", 80, Kernel.CUTLASS),
        (int8.FORMAT, "cuda", 90, Kernel.CUTLASS),
        (int8.FORMAT, "cuda", 100, Kernel.TRITON),
        (int8.FORMAT, "cuda", 120, Kernel.TRITON),
        (int8.FORMAT, "cpu", 0, Kernel.ONEDNN),
        (fp8.FORMAT, "cuda", 89, Kernel.CUTLASS),
        (fp8.FORMAT, "cuda", 90, Kernel.CUTLASS),
        (fp8.FORMAT, "cuda", 120, Kernel.CUTLASS),
        (fp8.FORMAT, "cpu", 0, Kernel.EMULATED),
        (fp8_block.FORMAT, "cuda", 89, Kernel.TRITON),
        (fp8_block.FORMAT, "cuda", 90, Kernel.CUTLASS),
        (fp8_block.FORMAT, "cuda", 120, Kernel.CUTLASS),
        (fp8_block.FORMAT, "cpu", 0, Kernel.EMULATED),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_kernel_follows_from_format_and_capability(fmt, device, capability, linear):
    assert choose_kernel(fmt, device, capability).linear is linear


@pytest.mark.parametrize("fmt", [fp8.FORMAT, fp8_block.FORMAT], ids=["fp8", "fp8_block"])
@pytest.mark.parametrize("capability", [75, 80, 86])
def test_fp8_on_a_gpu_without_it_is_refused_with_int8_as_the_remedy(capability, fmt):
    wanted = f"flashrl.precision={fmt.name} .*capability {capability / 10}.*at least 8.9. Set flashrl.precision=int8"
    with pytest.raises(ConfigError, match=wanted):
        choose_kernel(fmt, "cuda", capability)


@pytest.mark.parametrize("fmt", [int8.FORMAT, fp8.FORMAT, fp8_block.FORMAT], ids=["int8", "fp8", "fp8_block"])
def test_a_gpu_older_than_turing_is_told_bf16(fmt):
    with pytest.raises(ConfigError, match="Set flashrl.precision=bf16"):
        choose_kernel(fmt, "cuda", 70)
