# SPDX-License-Identifier: Apache-2.0
"""One call that quantizes a shard into the storage a GEMM kernel reads: a Triton kernel on CUDA, torch ops elsewhere.

Both write exactly the codes and scales of ``numerics.py``. The Triton kernel reads each row once (twice when a row is
longer than one block), so a refit costs about one read of the BF16 weights and one write of the codes.
"""

import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.numerics import RowFormat

_MAX_IN_REGISTERS = 8192
"""Longest row that a program holds in registers; longer rows are read twice, the second time from the L2 cache."""

_WARPS = {1024: 1, 2048: 4, 4096: 1, 5120: 4, 8192: 8}
"""Columns in registers, at least the row's: warps of a program. Measured on an H200 for rows of 768 to 8192 BF16 values: 85 to
103 % of the bandwidth of a copy, where the worst choice has half of it."""

_LONG_ROWS = ((16384, 8192, 4), (1 << 31, 4096, 16))
"""Longest row, columns read at a time, warps. Measured there for rows of 13824 to 27648 values: 88 to 94 % of a copy."""


def quantize_rows_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: RowFormat,
    column_offset: int = 0,
    flag: torch.Tensor | None = None,
) -> None:
    """Quantize rows of ``weight`` in place into ``codes`` and ``scales``.

    Args:
        weight: [N, K] bfloat16, float16 or float32, any strides.
        codes: [N, K_local] destination of ``fmt.dtype``; columns ``column_offset : column_offset + K_local`` of ``weight``
            land here (a row-parallel shard), with the scale of the whole row.
        scales: [N, 1] float32 destination.
        fmt: format of the codes.
        column_offset: first column of ``weight`` that belongs to ``codes``.
        flag: [1] int32 on the same device, set to 1 when ``weight`` holds NaN or Inf and left alone otherwise: nothing is
            copied to the host here.

    Raises:
        ValueError: the shapes or dtypes do not fit together, or ``weight`` is not floating point.
    """
    n, k = weight.shape
    k_local = codes.shape[1]
    if codes.shape[0] != n or scales.shape != (n, 1) or not 0 <= column_offset <= k - k_local or codes.dtype != fmt.dtype:
        raise ValueError(
            f"cannot quantize a weight of shape {tuple(weight.shape)} into {codes.dtype} codes {tuple(codes.shape)} of format "
            f"{fmt.name} and scales {tuple(scales.shape)} at column {column_offset}"
        )
    if not weight.is_floating_point():
        raise ValueError(f"expected a floating-point weight to quantize, got {weight.dtype}")
    if weight.is_cuda:
        _triton_quantize_rows_into(weight, codes, scales, fmt, column_offset, flag)
        return
    row_scales = numerics.row_scales(weight, fmt)
    local = weight.narrow(1, column_offset, k_local)
    codes.copy_(numerics.quantize_rows(local, fmt, row_scales)[0])
    scales.copy_(row_scales)
    if flag is not None:
        flag.logical_or_(~row_scales.isfinite().all())


def _triton_quantize_rows_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: RowFormat,
    column_offset: int,
    flag: torch.Tensor | None,
) -> None:
    from flashrl_verl.quantization import triton_rows  # Triton is only where a GPU is

    n, k = weight.shape
    arguments = (
        weight,
        codes,
        scales,
        scales if flag is None else flag,
        k,
        column_offset,
        codes.shape[1],
        weight.stride(0),
        weight.stride(1),
        codes.stride(0),
        codes.stride(1),
        scales.stride(0),
    )
    head, tail = split_row(k)
    if head + tail > _MAX_IN_REGISTERS:
        block, warps = next((block, warps) for longest, block, warps in _LONG_ROWS if k <= longest)
        triton_rows.quantize_long_rows_kernel[(n,)](
            *arguments, fmt.code_max, fmt.rounds_to_integers, flag is not None, BLOCK=block, num_warps=warps
        )
        return
    triton_rows.quantize_rows_kernel[(n,)](
        *arguments,
        fmt.code_max,
        fmt.rounds_to_integers,
        flag is not None,
        HEAD=head,
        TAIL=tail,
        num_warps=next(warps for columns, warps in _WARPS.items() if head + tail <= columns),
    )


def split_row(k: int) -> tuple[int, int]:
    """Split k columns into the largest power of two and the rest rounded up to one (0 where nothing is left).

    5120 becomes 4096 + 1024, where one power of two would be 8192.
    """
    head = 1 << (k.bit_length() - 1)
    rest = k - head
    return head, 1 << (rest - 1).bit_length() if rest else 0
