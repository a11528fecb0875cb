# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats of ``flashrl.precision``: their codes, and the kernels there are. ``gemm.py`` chooses.

INT8: integer codes -127 to 127 of rotated rows (``numerics.py``), INT32 accumulation. Ampere (8.0) is the first
with BF16 tensor cores too, which rotate activations.

FP8: E4M3 codes (1 sign, 4 exponent, 3 mantissa bits; no Inf; OCP 8-bit Floating Point Specification, 2023). Tensor
cores for it exist since Ada (8.9) and Hopper (9.0).

A CPU multiplies the codes of both in float32, for their accuracy.
"""

from dataclasses import replace
from enum import StrEnum

import torch

from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.settings import Precision


class Kernel(StrEnum):
    """Implementations of W8A8 multiplication; ``gemm.py`` and ``experts.py`` hold the code."""

    CUTLASS = "cutlass"
    TRITON = "triton"
    EMULATED = "emulated"
    """Quantized activations and weights multiplied in float32: the numbers of the format without its speed."""


INT8 = WeightFormat(
    name="int8",
    dtype=torch.int8,
    code_max=127.0,
    rotated=True,
)

INT8_UNROTATED = replace(INT8, rotated=False)
"""What exported folders hold, which plain vLLM serves."""

FP8 = WeightFormat(
    name="fp8",
    dtype=torch.float8_e4m3fn,
    code_max=448.0,
)


def weight_format(precision: Precision, rotation: bool = True) -> WeightFormat | None:
    """Return the format of a precision; None for BF16, which quantizes nothing. ``rotation``: ``flashrl.rotation``."""
    return {Precision.INT8: INT8 if rotation else INT8_UNROTATED, Precision.FP8: FP8}.get(precision)
