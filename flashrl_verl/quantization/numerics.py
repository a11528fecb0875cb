# SPDX-License-Identifier: Apache-2.0
"""Row-wise symmetric INT8: the arithmetic that every kernel, reference and receipt of this package repeats exactly.

One weight row ``w[n, :]`` (one output channel) has one float32 scale, and a code per element::

    scale[n]   = float32(max_k |w[n, k]|) / 127          IEEE division; 1 where the row is all zeros
    code[n, k] = round_half_even(float32(w[n, k]) / scale[n])     in [-127, 127]
    w[n, k]   ~= code[n, k] * scale[n]                   error at most scale / 2

The scale comes from the *whole* row, so the codes do not depend on how tensor parallelism cuts the columns. Nothing is
calibrated: the scheme is a function of the weight alone (W8A8, ``strategy: channel`` and dynamic per-token activations in
compressed-tensors' words). compressed-tensors' observer divides by about 127.5 and keeps BF16 scales, so about a tenth of
its codes differ: compare codes only after handing it the scales from here.
"""

import torch

INT8_MAX = 127
"""Largest code. -128 is never produced, so the code book is symmetric and -128 can mark storage that was never written."""

UNWRITTEN_CODE = -128


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of every row.

    Args:
        weight: [N, K] bfloat16, float16 or float32; K is the whole row, before any tensor-parallel narrowing.

    Returns:
        [N, 1] float32, strictly positive for finite input; NaN or Inf where the row holds one.
    """
    absmax = weight.abs().amax(dim=1, keepdim=True).float()
    # A tensor divisor: torch turns division by a Python number into a multiplication by its reciprocal on some
    # back ends, which is not the IEEE quotient.
    scales = absmax / torch.full_like(absmax, INT8_MAX)
    # absmax below 127 times the smallest subnormal underflows to 0 as well: such a row quantizes to zeros.
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def quantize_rows(weight: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight row by row.

    Args:
        weight: [N, K] bfloat16, float16 or float32.
        scales: [N, 1] float32 to use instead of those of ``weight`` (a column slice of a longer row needs the whole
            row's scales).

    Returns:
        codes [N, K] int8 and scales [N, 1] float32. Rows with NaN or Inf have meaningless codes and a non-finite
        scale: callers look at the scales.
    """
    if scales is None:
        scales = row_scales(weight)
    codes = (weight.float() / scales).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``codes * scales``: [N, K] int8 and [N, 1] float32 to [N, K] float32."""
    return codes.float() * scales


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB, ``10 log10(sum x^2 / sum (x - y)^2)``, accumulated in float64.

    Args:
        reference: any shape, floating point.
        approximation: the same shape.

    Returns:
        The ratio in decibels; ``inf`` for an exact approximation.
    """
    x, y = reference.double(), approximation.double()
    noise = (x - y).square().sum()
    if noise == 0:
        return float("inf")
    return float(10.0 * torch.log10(x.square().sum() / noise))
