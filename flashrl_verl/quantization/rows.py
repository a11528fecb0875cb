# SPDX-License-Identifier: Apache-2.0
"""Rows into the storage that a GEMM kernel reads: Triton kernels on CUDA, torch ops elsewhere.

Both give exactly the codes and scales of ``numerics.py``. The Triton kernel reads each row once (twice when a row is
longer than registers hold), so a refit costs about one read of the BF16 weights and one write of the codes.
"""

import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.numerics import WeightFormat

_WARPS = {1024: 1, 2048: 4, 4096: 1, 5120: 4, 8192: 8}
"""Columns in registers, at least the row's: warps of a program. Longer rows are read twice, the second time from the L2
cache. Measured on an H200 for rows of 768 to 8192 BF16 values: 85 to 103 % of the bandwidth of a copy, where the worst
choice has half of it."""

_LONG_ROWS = ((16384, 8192, 4), (1 << 31, 4096, 16))
"""Longest row, columns read at a time, warps. Measured there for rows of 13824 to 27648 values: 88 to 94 % of a
copy."""

_ROTATED_WARPS, _ROTATED_LONG_ROWS = {5120: 1}, ((1 << 31, 2048, 4),)
"""The same of rotated rows, in FP32. Measured there for rows of 896 to 27648 values: 1.6 to 2.1 times as long."""

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_rows_into(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat, column_offset: int = 0
) -> None:
    """Quantize rows of ``weight`` in place into ``codes`` and ``scales``; nothing is copied to the host. With a rotated
    format the block is that of ``codes``' columns, one rank's.

    Args:
        weight: [N, K] bfloat16, float16 or float32, any strides.
        codes: [N, K_local] destination of ``fmt.dtype``; columns ``column_offset : column_offset + K_local`` of
            ``weight`` land here (a row-parallel shard), with the scale of the whole row.
        scales: [N, 1] float32 destination; not finite where the row is not.
        fmt: format of the codes.
        column_offset: first column of ``weight`` that belongs to ``codes``.

    Raises:
        ValueError: ``weight`` has another dtype.
    """
    if weight.dtype not in _SOURCES:
        raise ValueError(f"expected a bfloat16, float16 or float32 weight to quantize, got {weight.dtype}")
    if weight.is_cuda:
        _launch(weight, codes, scales, fmt, column_offset)
        return
    weight = numerics.rotate_weight(weight, fmt.block(codes.shape[1]))
    row_scales = numerics.row_scales(weight, fmt)
    codes.copy_(numerics.quantize_rows(weight.narrow(1, column_offset, codes.shape[1]), fmt, row_scales)[0])
    scales.copy_(row_scales)


def _launch(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat, column_offset: int
) -> None:
    from flashrl_verl.quantization import triton_rows  # Triton is only where a GPU is

    if not codes.numel():
        return
    (rows, k), k_local = weight.shape, codes.shape[1]
    strides = (*weight.stride(), *codes.stride(), scales.stride(0))
    stages = fmt.block(k_local).bit_length() - 1
    arguments = (weight, codes, scales, k, column_offset, k_local, *strides, fmt.code_max, fmt.rounds_to_integers)
    in_registers, long_rows = (_ROTATED_WARPS, _ROTATED_LONG_ROWS) if stages else (_WARPS, _LONG_ROWS)
    head, tail = split_row(k)
    for columns, warps in in_registers.items():
        if head + tail <= columns:
            triton_rows.quantize_rows_kernel[(rows,)](*arguments, STAGES=stages, HEAD=head, TAIL=tail, num_warps=warps)
            return
    chunk, warps = next((chunk, warps) for longest, chunk, warps in long_rows if k <= longest)
    triton_rows.quantize_long_rows_kernel[(rows,)](*arguments, STAGES=stages, CHUNK=chunk, num_warps=warps)


def split_row(k: int) -> tuple[int, int]:
    """Split k columns into the largest power of two and the rest rounded up to one (0 where nothing is left).

    5120 becomes 4096 + 1024, where one power of two would be 8192.
    """
    head = 1 << (k.bit_length() - 1)
    rest = k - head
    return head, 1 << (rest - 1).bit_length() if rest else 0


_IN_4_WARPS, _IN_16_WARPS = 8192, 32768
"""Channels of a token that a program of so many warps holds in registers."""
_FEW_TOKENS = 256
"""So few do not fill a GPU: each then has 16 warps. Measured on an H200 beside vLLM's kernel without rotation:
docs/LOG.md."""


def rotate_quantize_tokens(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate tokens and quantize them to INT8, by ``numerics.py``, on CUDA.

    Args:
        x: [T, K] bfloat16 or float16, contiguous in K.
        block: of ``WeightFormat.block``, 16 or more.

    Returns:
        codes [T, K] int8, scales [T, 1] float32.
    """
    from flashrl_verl.quantization import triton_tokens  # Triton is only where a GPU is

    tokens, k = x.shape
    codes = torch.empty(tokens, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    if tokens:
        lines, warps = max(16, 1 << (k // block - 1).bit_length()), 4
        if lines * block > _IN_4_WARPS:
            one = tokens <= _FEW_TOKENS and lines * block <= _IN_16_WARPS
            lines, warps = (lines, 16) if one else (64, 4)
        triton_tokens.rotate_quantize_kernel[(tokens,)](
            x, codes, scales, k, x.stride(0), BLOCK=block, LINES=lines, ONE=lines * block >= k, num_warps=warps
        )
    return codes, scales
