# SPDX-License-Identifier: Apache-2.0
"""FP8 W8A8: E4M3 codes (1 sign, 4 exponent, 3 mantissa bits; no Inf; OCP 8-bit Floating Point Specification, 2023).

Tensor cores for it exist since Ada (8.9) and Hopper (9.0). A CPU multiplies the same codes in float32: the accuracy of the
format can be looked at there, its speed cannot.
"""

import torch

from flashrl_verl.quantization.formats import Kernel, KernelChoice
from flashrl_verl.quantization.numerics import WeightFormat

FORMAT = WeightFormat(
    name="fp8",
    dtype=torch.float8_e4m3fn,
    code_max=448.0,
    unwritten=0x7F,  # NaN
)

KERNELS = (
    KernelChoice(device="cuda", since=89, linear=Kernel.CUTLASS, experts=Kernel.TRITON),
    KernelChoice(device="cpu", linear=Kernel.EMULATED, experts=Kernel.EMULATED),
)
