# SPDX-License-Identifier: Apache-2.0
"""FP8 W8A8 in blocks, as DeepSeek-V3 and verl's own FP8 rollout have it: E4M3 codes, one scale per 128 x 128 of the weight.

Activations get one scale per token and 128 input columns, dynamically. Scales are float32 and absmax / 448, no powers of two:
DeepGEMM, for which vLLM makes them such where it finds it (Hopper and Blackwell), is not used. The kernels are vLLM's: CUTLASS
from Hopper on (built with CUDA 12.0 for 9.0, 12.8 from 10.0), Triton on Ada; a CPU multiplies the same codes in float32.
"""

import torch

from flashrl_verl.config import Precision
from flashrl_verl.quantization.formats import Kernel, KernelChoice
from flashrl_verl.quantization.numerics import WeightFormat

FORMAT = WeightFormat(
    name="fp8_block",
    dtype=torch.float8_e4m3fn,
    code_max=448.0,
    unwritten=0x7F,  # NaN
    block=Precision.FP8_BLOCK.block,
)

KERNELS = (
    KernelChoice(device="cuda", since=90, linear=Kernel.CUTLASS, experts=Kernel.TRITON),
    KernelChoice(device="cuda", since=89, before=90, linear=Kernel.TRITON, experts=Kernel.TRITON),
    KernelChoice(device="cpu", linear=Kernel.EMULATED, experts=Kernel.EMULATED),
)
