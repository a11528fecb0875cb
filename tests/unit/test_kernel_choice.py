# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies a format on which device, and what a device without one is told."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats import FP8, INT8, Kernel
from flashrl_verl.quantization.gemm import choose_kernel


@pytest.mark.parametrize(
    "fmt, device, capability, linear",
    [
        (INT8, "cuda", 75, Kernel.CUTLASS),
        (INT8, "cuda", 80, Kernel.CUTLASS),
        (INT8, "cuda", 90, Kernel.CUTLASS),
        (INT8, "cuda", 100, Kernel.TRITON),
        (INT8, "cuda", 120, Kernel.TRITON),
        (INT8, "cpu", 0, Kernel.ONEDNN),
        (FP8, "cuda", 89, Kernel.CUTLASS),
        (FP8, "cuda", 90, Kernel.CUTLASS),
        (FP8, "cuda", 120, Kernel.CUTLASS),
        (FP8, "cpu", 0, Kernel.EMULATED),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_kernel_follows_from_format_and_capability(fmt, device, capability, linear):
    assert choose_kernel(fmt, device, capability).linear is linear


@pytest.mark.parametrize("capability", [75, 80, 86])
def test_fp8_on_a_gpu_without_it_is_refused_with_int8_as_the_remedy(capability):
    wanted = f"flashrl.precision=fp8 .*capability {capability / 10}.*at least 8.9. Set flashrl.precision=int8"
    with pytest.raises(ConfigError, match=wanted):
        choose_kernel(FP8, "cuda", capability)


@pytest.mark.parametrize("fmt", [INT8, FP8], ids=["int8", "fp8"])
def test_a_gpu_older_than_turing_is_told_bf16(fmt):
    with pytest.raises(ConfigError, match="Set flashrl.precision=bf16"):
        choose_kernel(fmt, "cuda", 70)
