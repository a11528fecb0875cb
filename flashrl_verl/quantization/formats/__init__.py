# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats of ``flashrl.precision``, one small file each: the codes, and which kernel multiplies them where.

A new format is a file here that defines ``FORMAT`` and ``KERNELS``, and its name in ``flashrl_verl.config.Precision``.
"""

import importlib
from dataclasses import dataclass
from enum import Enum

from flashrl_verl.config import Precision
from flashrl_verl.quantization.numerics import WeightFormat


class Kernel(str, Enum):
    """Implementations of W8A8 multiplication; ``gemm.py`` and ``moe.py`` hold the code."""

    CUTLASS = "cutlass"
    TRITON = "triton"
    ONEDNN = "onednn"
    EMULATED = "emulated"
    """Quantized activations and weights multiplied in float32: the numbers of the format without its speed."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """A kernel, and the devices that use it. The first choice that fits a device is taken."""

    device: str
    """``cuda`` or ``cpu``."""
    linear: Kernel
    """For linear layers."""
    experts: Kernel
    """For fused mixture-of-experts layers."""
    since: int = 0
    """Lowest compute capability, 10 x major + minor; CUDA only."""
    before: int = 1000
    """Lowest compute capability that is too new; CUDA only."""


def weight_format(precision: Precision) -> WeightFormat | None:
    """Return the format of a precision; None for BF16, which quantizes nothing."""
    return None if precision is Precision.BF16 else _module(precision.value).FORMAT


def kernel_choices(fmt: WeightFormat) -> tuple[KernelChoice, ...]:
    """Return the kernels of a format, in order of preference."""
    return _module(fmt.name).KERNELS


def _module(name: str):
    return importlib.import_module(f"{__name__}.{name}")
