# SPDX-License-Identifier: Apache-2.0
"""Symmetric quantization: the arithmetic that every kernel, reference and receipt of this package repeats exactly.

One weight row ``w[n, :]`` (one output channel) has one float32 scale, and an 8-bit code per element::

    scale[n]   = float32(max_k |w[n, k]|) / code_max              IEEE division; 1 where the row is all zeros
    code[n, k] = round_half_even(float32(w[n, k]) / scale[n])     to the format's grid, clamped to [-code_max, code_max]
    w[n, k]   ~= code[n, k] * scale[n]

``code_max`` is 127 for INT8, whose grid is the integers, and 448 for FP8 E4M3, whose grid has 3 mantissa bits. The scale comes
from the *whole* row, so the codes do not depend on how tensor parallelism cuts the columns. A format with a ``block`` of B has
the same with a scale for every B x B block of the weight (DeepSeek-V3, arXiv 2412.19437, section 3.3.2: B = 128), and for every
B values of a token; no block lies in two ranks, so there too nothing depends on the cut. Nothing is calibrated: the scheme is a
function of the weight alone (W8A8, ``strategy: channel`` or ``block``, and dynamic per-token or ``group`` activations in
compressed-tensors' words).
compressed-tensors' observer divides by about 127.5 and keeps BF16 scales, so about a tenth of its INT8 codes differ: compare
codes only after handing it the scales from here.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """An 8-bit number format of the codes. The formats are in ``formats/``."""

    name: str
    """Value of ``flashrl.precision``."""

    dtype: torch.dtype
    """Of the stored codes; one byte."""

    code_max: float
    """Largest code: what a row's absmax becomes. The code book is symmetric."""

    unwritten: int
    """A byte, 0 to 255, that quantizing a finite row never produces: it marks storage that nobody wrote."""

    block: int | None = None
    """Rows and columns that share a scale; None where a whole row has one of its own."""

    @property
    def rounds_to_integers(self) -> bool:
        return not self.dtype.is_floating_point

    @property
    def rows_per_scale(self) -> int:
        return self.block or 1

    @property
    def storage(self) -> str:
        """What storage of the format is, in words: ``QuantizedStorage.kind`` says the same of storage that is there."""
        return storage_kind(self.dtype, self.block or 1, self.block)

    def scale_shape(self, *shape: int) -> tuple[int, ...]:
        """Shape of the scales of codes [..., N, K]: [..., N, 1], or with blocks [..., N / B, K / B], which must be whole."""
        *outer, rows, columns = shape
        if self.block is None:
            return *outer, rows, 1
        assert rows % self.block == columns % self.block == 0, f"{shape} in blocks of {self.block}"
        return *outer, rows // self.block, columns // self.block


def storage_kind(dtype: torch.dtype, rows: int, columns: int | None) -> str:
    """Name of codes of a dtype with a scale for so many rows and columns; columns None is a whole row."""
    name = str(dtype).removeprefix("torch.")
    return name if (rows, columns) == (1, None) else f"{name} by {rows}x{columns or 'all'}"


def row_scales(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Return the scale of every row.

    Args:
        weight: [..., N, K] bfloat16, float16 or float32; K is the whole row, before any tensor-parallel narrowing.
        fmt: format of the codes.

    Returns:
        [..., N, 1] float32, strictly positive for finite input; NaN or Inf where the row holds one.
    """
    return _scales(weight.abs().amax(dim=-1, keepdim=True).float(), fmt)


def block_scales(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Return the scale of every block.

    Args:
        weight: [..., N, K] bfloat16, float16 or float32, in whole blocks.
        fmt: a format with blocks.

    Returns:
        [..., N / B, K / B] float32, as ``row_scales``.
    """
    blocks = weight.unflatten(-1, (-1, fmt.block)).unflatten(-3, (-1, fmt.block))  # [..., N / B, B, K / B, B]
    return _scales(blocks.abs().amax(dim=(-3, -1)).float(), fmt)


def _scales(absmax: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    # A tensor divisor: torch turns division by a Python number into a multiplication by its reciprocal on some
    # back ends, which is not the IEEE quotient.
    scales = absmax / torch.full_like(absmax, fmt.code_max)
    # absmax below code_max times the smallest subnormal underflows to 0 as well: such a row quantizes to zeros.
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def quantize_rows(
    weight: torch.Tensor, fmt: WeightFormat, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight row by row.

    Args:
        weight: [..., N, K] bfloat16, float16 or float32.
        fmt: format of the codes.
        scales: [..., N, 1] float32 to use instead of those of ``weight`` (a column slice of a longer row needs the whole
            row's scales).

    Returns:
        codes [..., N, K] of ``fmt.dtype`` and scales [..., N, 1] float32. Rows with NaN or Inf have meaningless codes and a
        non-finite scale: callers look at the scales.
    """
    if scales is None:
        scales = row_scales(weight, fmt)
    return _codes(weight, scales, fmt), scales


def quantize(weight: torch.Tensor, fmt: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a whole weight as its format groups it.

    Args:
        weight: [..., N, K] bfloat16, float16 or float32; in whole blocks, if the format has them.
        fmt: format of the codes.

    Returns:
        codes [..., N, K] of ``fmt.dtype`` and scales, ``fmt.scale_shape`` float32; where those are not finite, the codes mean
        nothing.
    """
    if fmt.block is None:
        return quantize_rows(weight, fmt)
    scales = block_scales(weight, fmt)
    return _codes(weight, spread(scales, weight.shape), fmt), scales


def _codes(weight: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Codes of a weight under scales that broadcast with it."""
    codes = weight.float() / scales
    if fmt.rounds_to_integers:
        codes = codes.round_()
    # absmax / scale may exceed code_max by a rounding error, and E4M3 has no Inf: past 464 torch's cast gives NaN. The cast
    # itself rounds half to even, subnormals included.
    return codes.clamp_(-fmt.code_max, fmt.code_max).to(fmt.dtype)


def spread(scales: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Scales of rows or blocks, [..., n, k] float32, as one for each element: broadcasts with [..., N, K] = ``shape``."""
    for dim in (-2, -1):
        if scales.shape[dim] not in (1, shape[dim]):
            scales = scales.repeat_interleave(shape[dim] // scales.shape[dim], dim)
    return scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``codes * scales``: [..., N, K] codes and the scales of their rows or blocks to [..., N, K] float32."""
    return codes.float() * spread(scales, codes.shape)


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """View codes as uint8, whatever their format: torch has no comparison, ``eq`` or ``index_fill`` for FP8 dtypes."""
    return codes.view(torch.uint8)


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
