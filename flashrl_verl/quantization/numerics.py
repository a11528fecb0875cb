# SPDX-License-Identifier: Apache-2.0
"""Symmetric quantization: the arithmetic that every kernel, reference and receipt of this package repeats exactly.

One weight row ``w[n, :]`` (one output channel) has one float32 scale, and an 8-bit code per element::

    scale[n]   = float32(max_k |w[n, k]|) / code_max              IEEE division; 1 where the row is all zeros
    code[n, k] = round_half_even(float32(w[n, k]) / scale[n])     to the format's grid, clamped to [-code_max, code_max]
    w[n, k]   ~= code[n, k] * scale[n]

``code_max`` is 127 for INT8, whose grid is the integers, and 448 for FP8 E4M3, whose grid has 3 mantissa bits. The
scale comes from the *whole* row, whatever columns a tensor-parallel rank has. Nothing is
calibrated: the scheme is a function of the weight alone (W8A8; in compressed-tensors' words ``strategy: channel`` and
dynamic per-token activations).
compressed-tensors' observer divides by about 127.5 and keeps BF16 scales, so about a tenth of its INT8 codes differ:
compare codes only after handing it the scales from here.

**Rotation** (INT8). A few input channels of a language model are tens of times larger than the others, and a scale that
fits them rounds the others away. So both factors of ``y = w x`` are rotated, which leaves the product as it is: with H
the Hadamard matrix of ``b`` channels, whose entries are 1 and -1 (Sylvester's order:
``H[i, j] = (-1)^popcount(i & j)``, symmetric, ``H H = b``),

    y = w x = sum over blocks of b channels of (w H / b) (H x)

and ``w H / b`` and ``H x`` are what is quantized. An outlier is spread over its block, where even steps lose little.
(FP8's steps grow with the value: spreading gives it little.) ``b`` is ``WeightFormat.block`` of the layer's input
channels on one tensor-parallel rank, so that no rank's slice cuts a block, and codes are equal for all tensor-parallel
sizes with the same block.
The weight's rotation is exact to the bit: log2(b) stages of float32 additions, first between neighbours,
then two apart, four, ..., and last a factor 1/b, a power of two::

    for m in 1, 2, 4, ..., b/2:   w[i], w[i + m] = w[i] + w[i + m], w[i] - w[i + m]      where i has no bit m

Activations are rotated so on a CPU; on a GPU tensor cores add in an order of their own: scales are
within 2 ulp, and at most one code in 10,000 is its neighbour.
Rotated quantization: QuaRot (arXiv 2404.00456), QuIP# (arXiv 2402.04396); block-diagonal and inside the layer, it needs
no change of the checkpoint.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """An 8-bit number format of the codes. The formats are in ``formats.py``."""

    name: str
    """Value of ``flashrl.precision``."""

    dtype: torch.dtype
    """Of the stored codes; one byte."""

    code_max: float
    """Largest code: what a row's absmax becomes. The code book is symmetric."""

    rotated: bool = False
    """Whether weights and activations are rotated before they are quantized."""

    def block(self, columns: int) -> int:
        """Channels rotated together in a layer with so many input channels a rank: the largest power of two up to
        ``MAX_BLOCK`` that divides them; 1, which is no rotation, where that is below ``MIN_BLOCK``."""
        block = min(columns & -columns, MAX_BLOCK)
        return block if self.rotated and block >= MIN_BLOCK else 1

    @property
    def rounds_to_integers(self) -> bool:
        return not self.dtype.is_floating_point

    @property
    def storage(self) -> str:
        """Name of the dtype, as ``rollout/inspection.py`` reads it off a live engine."""
        return str(self.dtype).removeprefix("torch.")


MAX_BLOCK, MIN_BLOCK = 64, 16
"""Channels of a rotation: more bring nothing, and tensor cores (Triton's ``tl.dot``) take 16 at least."""


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """``H x`` of every block of channels, in the order of additions above and without a factor.

    Args:
        x: [..., K] bfloat16, float16 or float32; K is a multiple of ``block``.
        block: of ``WeightFormat.block``; 1 returns x as it is.

    Returns:
        [..., K] float32; x itself with a block of 1. NaN and Inf make their block NaN or Inf.
    """
    if block == 1:
        return x
    shape, x, distance = x.shape, x.float(), 1
    while distance < block:
        a, b = x.reshape(-1, 2, distance).unbind(1)
        x, distance = torch.stack([a + b, a - b], 1), 2 * distance
    return x.reshape(shape)


def rotate_weight(weight: torch.Tensor, block: int) -> torch.Tensor:
    """``w H / b``: ``rotate`` of the rows [..., K], times 1/b."""
    return weight if block == 1 else rotate(weight, block) * (1.0 / block)


def row_scales(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Return the scale of every row.

    Args:
        weight: [..., N, K] bfloat16, float16 or float32; K is the whole row, before any tensor-parallel narrowing.
        fmt: format of the codes.

    Returns:
        [..., N, 1] float32, strictly positive for finite input; NaN or Inf where the row holds one.
    """
    absmax = weight.abs().amax(dim=-1, keepdim=True).float()
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
        scales: [..., N, 1] float32 to use instead of those of ``weight`` (a column slice of a longer row needs the
            whole row's scales).

    Returns:
        codes [..., N, K] of ``fmt.dtype`` and scales [..., N, 1] float32. Rows with NaN or Inf have meaningless codes
        and a non-finite scale: callers look at the scales.
    """
    if scales is None:
        scales = row_scales(weight, fmt)
    codes = weight.float() / scales
    if fmt.rounds_to_integers:
        codes = codes.round_()
    # absmax / scale may exceed code_max by a rounding error, and E4M3 has no Inf: past 464 torch's cast gives NaN. The
    # cast itself rounds half to even, subnormals included.
    return codes.clamp_(-fmt.code_max, fmt.code_max).to(fmt.dtype), scales


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """View codes as uint8, whatever their format: torch has no comparison, ``eq`` or ``index_fill`` for FP8 dtypes."""
    return codes.view(torch.uint8)
