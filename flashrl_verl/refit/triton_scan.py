# SPDX-License-Identifier: Apache-2.0
"""The checksum of ``scan.py`` on a GPU: one read of each tensor, one launch for many."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Words a program reads at a time, 32 a thread at 8 warps; at most one more than the period."""

_SUMMED = 8
"""Weighted words added up in int32: 8 x 2^15 x 8191 is below 2^31."""

_PROGRAMS = 1024
"""Programs that share a tensor, at most: about as many as run at once on the largest GPUs."""


@triton.jit
def _checksum_kernel(
    table_ptr, out_ptr, PERIOD: tl.constexpr, ALIGNED: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr
):
    tensor = tl.program_id(1)
    address, words = tl.load(table_ptr + 2 * tensor), tl.load(table_ptr + 2 * tensor + 1)
    word_ptr = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:  # of pointers and masks alike, or loads are of 2 bytes
        word_ptr, words = tl.multiple_of(word_ptr, 16), tl.multiple_of(words, 16)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK // SUMMED], tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0).to(tl.int64) * BLOCK):
        values = tl.load(word_ptr + start + offsets, mask=start + offsets < words, other=0).to(tl.int32)
        place = (start % PERIOD).to(tl.int32) + offsets  # below twice the period
        weights = 1 + tl.where(place < PERIOD, place, place - PERIOD)
        # 64-bit multiplications and additions are several instructions each: most of the sum is made in 32 bits.
        total += tl.sum(tl.reshape(values * weights, [BLOCK // SUMMED, SUMMED]), 1).to(tl.int64)
    tl.atomic_add(out_ptr + tensor, tl.sum(total, 0))


def checksums_on_gpu(words: Sequence[torch.Tensor], period: int) -> torch.Tensor:
    """Return the tensors' checksums, [len(words)] int64 on their device; nothing is copied to the host.

    Args:
        words: contiguous int16 tensors on one device, none empty.
        period: after which the weights of the sum repeat.
    """
    rows = [(tensor.data_ptr(), tensor.numel()) for tensor in words]
    out = torch.zeros(len(rows), dtype=torch.int64, device=words[0].device)
    table = torch.tensor(rows).to(out.device, non_blocking=True)
    blocks = triton.cdiv(max(count for _, count in rows), _BLOCK)
    _checksum_kernel[(min(blocks, _PROGRAMS), len(rows))](
        table,
        out,
        PERIOD=period,
        ALIGNED=all(address % 16 == count % 16 == 0 for address, count in rows),
        SUMMED=_SUMMED,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
