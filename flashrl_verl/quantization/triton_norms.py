# SPDX-License-Identifier: Apache-2.0
"""Row norms of a matrix of any dtype, columns weighted, in one read of it."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _row_norms_kernel(w_ptr, g_ptr, out_ptr, k, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        columns = start + offsets
        inside = columns < k
        x = tl.load(w_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        x *= tl.load(g_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(out_ptr + row, tl.sqrt(tl.sum(squares, axis=0)))


def row_norms_on_gpu(weight: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Return ``||w_j * gains||_2`` of every row: [N] float32.

    Args:
        weight: [N, K] of any dtype, columns contiguous.
        gains: [K] floating point, contiguous.
    """
    out = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    _row_norms_kernel[(weight.shape[0],)](weight, gains, out, weight.shape[1], weight.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
