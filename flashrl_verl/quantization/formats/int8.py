# SPDX-License-Identifier: Apache-2.0
"""INT8 W8A8: integer codes -127 to 127, INT32 accumulation. Every GPU since Turing has the tensor cores, A100 among them."""

import torch

from flashrl_verl.quantization.formats import Kernel, KernelChoice
from flashrl_verl.quantization.numerics import WeightFormat

FORMAT = WeightFormat(
    name="int8",
    dtype=torch.int8,
    code_max=127.0,
    unwritten=0x80,  # -128: the code book is symmetric and never holds it
)

KERNELS = (
    KernelChoice(device="cuda", since=75, before=100, linear=Kernel.CUTLASS, experts=Kernel.TRITON),
    # vLLM's CUTLASS has no INT8 from Blackwell on (vllm#54311).
    KernelChoice(device="cuda", since=100, linear=Kernel.TRITON, experts=Kernel.TRITON),
    KernelChoice(device="cpu", linear=Kernel.ONEDNN, experts=Kernel.ONEDNN),
)
