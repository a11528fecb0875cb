# SPDX-License-Identifier: Apache-2.0
"""One call that quantizes shards into the storage a GEMM kernel reads: a Triton kernel on CUDA, torch ops elsewhere.

Both write exactly the codes and scales of ``numerics.py``. The Triton kernels read each row or block once (twice when a row is
longer than registers hold), so a refit costs about one read of the BF16 weights and one write of the codes. ``row_table.py``
launches them for the shards of a whole bucket: one at a time, small shards leave the GPU idle between them, and the host is
slower than it.
"""

import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.numerics import WeightFormat

_MAX_IN_REGISTERS = 8192
"""Longest row that a program holds in registers; longer rows are read twice, the second time from the L2 cache."""

_WARPS = {1024: 1, 2048: 4, 4096: 1, 5120: 4, 8192: 8}
"""Columns in registers, at least the row's: warps of a program. Measured on an H200 for rows of 768 to 8192 BF16 values: 85 to
103 % of the bandwidth of a copy, where the worst choice has half of it."""

_LONG_ROWS = ((16384, 8192, 4), (1 << 31, 4096, 16))
"""Longest row, columns read at a time, warps. Measured there for rows of 13824 to 27648 values: 88 to 94 % of a copy."""

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)

_BLOCK_WARPS = 8
"""Warps of a program that holds one block of 128 x 128 values in registers, 64 a thread: compiled for 9.0 and aligned it takes
150 to 166 registers and spills none, with half the warps it spills. Its speed is not measured."""


def quantize_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: WeightFormat,
    column_offset: int = 0,
    flag: torch.Tensor | None = None,
) -> None:
    """``quantize_rows_into`` or ``quantize_blocks_into``, as the format groups its scales."""
    quantize = quantize_rows_into if fmt.block is None else quantize_blocks_into
    quantize(weight, codes, scales, fmt, column_offset, flag)


def quantize_blocks_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: WeightFormat,
    column_offset: int = 0,
    flag: torch.Tensor | None = None,
) -> None:
    """Quantize blocks of ``weight`` in place into ``codes`` and ``scales``.

    Args:
        weight: [N, K] bfloat16, float16 or float32, any strides.
        codes: [N, K_local] destination of ``fmt.dtype``, in whole blocks; columns ``column_offset : column_offset + K_local``
            of ``weight`` land here (a row-parallel shard), and no others are looked at.
        scales: [N / B, K_local / B] float32 destination.
        fmt: a format with blocks.
        column_offset: first column of ``weight`` that belongs to ``codes``, a multiple of B.
        flag: as in ``quantize_rows_into``, of these columns.

    Raises:
        ValueError: the shapes or dtypes do not fit together, or ``weight`` is not floating point.
    """
    require_fit(weight, codes, scales, fmt, column_offset)
    if weight.is_cuda:
        launch_blocks(weight, codes, scales, fmt, column_offset, flag, rows=weight.shape[0])
        return
    local = weight.narrow(1, column_offset, codes.shape[1])
    found_codes, found_scales = numerics.quantize(local, fmt)
    codes.copy_(found_codes)
    scales.copy_(found_scales)
    if flag is not None:
        flag.logical_or_(~found_scales.isfinite().all())


def quantize_rows_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: WeightFormat,
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
    require_fit(weight, codes, scales, fmt, column_offset)
    if weight.is_cuda:
        launch_rows(weight, codes, scales, fmt, column_offset, flag, rows=weight.shape[0])
        return
    row_scales = numerics.row_scales(weight, fmt)
    local = weight.narrow(1, column_offset, codes.shape[1])
    codes.copy_(numerics.quantize_rows(local, fmt, row_scales)[0])
    scales.copy_(row_scales)
    if flag is not None:
        flag.logical_or_(~row_scales.isfinite().all())


def require_fit(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat, column_offset: int) -> None:
    n, k = weight.shape
    block = fmt.block or 1
    if (
        codes.shape[0] != n
        or n % block
        or codes.shape[1] % block
        or column_offset % block
        or scales.shape != fmt.scale_shape(*codes.shape)
        or not 0 <= column_offset <= k - codes.shape[1]
        or codes.dtype != fmt.dtype
        or scales.dtype != torch.float32
        or not weight.device == codes.device == scales.device
    ):
        raise ValueError(
            f"cannot quantize a weight of shape {tuple(weight.shape)} on {weight.device} into {codes.dtype} codes "
            f"{tuple(codes.shape)} of format {fmt.name} and {scales.dtype} scales {tuple(scales.shape)} on {codes.device} at "
            f"column {column_offset}"
        )
    if weight.dtype not in _SOURCES:
        raise ValueError(f"expected a bfloat16, float16 or float32 weight to quantize, got {weight.dtype}")


def launch_rows(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: WeightFormat,
    column_offset: int,
    flag: torch.Tensor | None,
    rows: int,
    table: torch.Tensor | None = None,
    granule: int = 1,
    aligned: bool = False,
) -> None:
    """Launch the Triton kernel on ``rows`` rows: of these tensors, or of the places in ``table``."""
    from flashrl_verl.quantization import triton_rows  # Triton is only where a GPU is

    k, k_local = weight.shape[1], codes.shape[1]
    strides = (*weight.stride(), *codes.stride(), scales.stride(0)) if table is None else (k, 1, k_local, 1, 1)
    arguments = (
        weight,
        codes,
        scales,
        scales if flag is None else flag,
        scales if table is None else table,
        granule,
        k,
        column_offset,
        k_local,
        *strides,
        fmt.code_max,
        fmt.rounds_to_integers,
        flag is not None,
        table is not None,
        aligned,
    )
    head, tail = split_row(k)
    if head + tail > _MAX_IN_REGISTERS:
        block, warps = next((block, warps) for longest, block, warps in _LONG_ROWS if k <= longest)
        triton_rows.quantize_long_rows_kernel[(rows,)](*arguments, BLOCK=block, num_warps=warps)
        return
    warps = next(warps for columns, warps in _WARPS.items() if head + tail <= columns)
    triton_rows.quantize_rows_kernel[(rows,)](*arguments, HEAD=head, TAIL=tail, num_warps=warps)


def launch_blocks(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: WeightFormat,
    column_offset: int,
    flag: torch.Tensor | None,
    rows: int,
    table: torch.Tensor | None = None,
    granule: int = 1,
    aligned: bool = False,
) -> None:
    """Launch the Triton kernel on ``rows`` rows in blocks: of these tensors, or of the places in ``table``, which has one for
    every row of blocks (``granule`` says the same)."""
    from flashrl_verl.quantization.triton_blocks import quantize_blocks_kernel  # Triton is only where a GPU is

    if not codes.numel():
        return
    k_local, block = codes.shape[1], fmt.block
    local = weight.narrow(1, column_offset, k_local)
    strides = (*local.stride(), *codes.stride(), *scales.stride()) if table is None else (weight.shape[1], 1, k_local, 1, 1, 1)
    quantize_blocks_kernel[(rows // block, k_local // block)](
        local,
        codes,
        scales,
        scales if flag is None else flag,
        scales if table is None else table,
        *strides,
        fmt.code_max,
        flag is not None,
        table is not None,
        aligned,
        block,
        num_warps=_BLOCK_WARPS,
    )


def split_row(k: int) -> tuple[int, int]:
    """Split k columns into the largest power of two and the rest rounded up to one (0 where nothing is left).

    5120 becomes 4096 + 1024, where one power of two would be 8192.
    """
    head = 1 << (k.bit_length() - 1)
    rest = k - head
    return head, 1 << (rest - 1).bit_length() if rest else 0
