# SPDX-License-Identifier: Apache-2.0
"""What a refit does to every 16-bit word of a tensor besides quantizing it, on a GPU: checksums, the search for Inf and NaN,
and copies that search on the way. One read each (torch's own ops would convert, compare and reduce in several passes;
``receipt.py`` defines checksum and search)."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Words a program reads: two loads of 16 bytes a thread at 8 warps, four times."""

_SUMMED = 8
"""Weighted words added up in int32: 8 x 2^15 x 8191 is below 2^31."""

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of the exponent in a word; all ones mean Inf or NaN."""

_WORDS = {2: torch.int16, 4: torch.int32}
"""Words by size of an element."""

_PIECES = 64
"""Programs an entry of ``CopyTable`` has: of a small tensor most end at once, a large one has many entries."""

_ALIGNED_ELEMENTS = 16
"""Distances that are multiples of this let the kernel load and store vectors."""


@triton.jit
def _checksum_kernel(word_ptr, sum_ptr, words, PERIOD: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    values = tl.load(word_ptr + start + offsets, mask=start + offsets < words, other=0).to(tl.int32)
    weights = 1 + ((start % PERIOD).to(tl.int32) + offsets) % PERIOD
    # 64-bit multiplications and additions are several instructions each: most of the sum is made in 32 bits.
    few = tl.sum(tl.reshape(values * weights, [BLOCK // SUMMED, SUMMED]), 1)
    tl.atomic_add(sum_ptr, tl.sum(few.to(tl.int64), 0))


@triton.jit
def _finite_kernel(word_ptr, flag_ptr, words, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(word_ptr + offsets, mask=offsets < words, other=0).to(tl.int32)
    bad = tl.max(((values & EXPONENT) == EXPONENT).to(tl.int32), 0)
    tl.store(flag_ptr, False, mask=bad > 0)


@triton.jit
def _copy_kernel(
    source_ptr, target_ptr, flag_ptr, table_ptr,
    EXPONENT: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = table_ptr + (tl.program_id(0) // PIECES) * 3
    start = (tl.program_id(0) % PIECES) * BLOCK
    words = tl.load(entry + 2)
    if start < words:
        source_at, target_at = tl.load(entry), tl.load(entry + 1)
        if ALIGNED:
            source_at, target_at = tl.multiple_of(source_at, 16), tl.multiple_of(target_at, 16)
            words = tl.multiple_of(words, 16)
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(source_ptr + source_at + offsets, mask=offsets < words, other=0)
        tl.store(target_ptr + target_at + offsets, values, mask=offsets < words)
        bad = tl.max(((values & EXPONENT) == EXPONENT).to(tl.int32), 0)
        tl.store(flag_ptr, 1, mask=bad > 0)


class CopyTable:
    """Many copies within one GPU in one launch, which raise a flag where they meet Inf or NaN.

    The targets' places are fixed; those of the sources are relative to the first one's.

    Args:
        pairs: (source, target), at least one; contiguous, of equal numbers of elements and one dtype, which is BF16, FP16 or
            FP32.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        first, target = pairs[0]
        self._dtype = first.dtype
        self._targets = [t for _, t in pairs]  # alive as long as the table has their addresses
        size = first.element_size()
        chunk = _PIECES * _BLOCK
        entries = []
        for s, t in pairs:
            assert s.dtype == t.dtype == self._dtype and s.numel() == t.numel() and s.is_contiguous() and t.is_contiguous()
            places = (s.data_ptr() - first.data_ptr()) // size, (t.data_ptr() - target.data_ptr()) // size
            entries += [(places[0] + i, places[1] + i, min(chunk, s.numel() - i)) for i in range(0, s.numel(), chunk)]
        table = np.array(entries, np.int64).reshape(-1, 3)
        self._aligned = not (table % _ALIGNED_ELEMENTS).any()
        self._table = torch.from_numpy(table).to(target.device)

    def launch(self, source: torch.Tensor, flag: torch.Tensor) -> None:
        """Copy. Args: source: the first one, where it is now; flag: [1] int32, set to 1 by a value that is not finite."""
        words = _WORDS[source.element_size()]
        _copy_kernel[(len(self._table) * _PIECES,)](
            source.view(-1).view(words),
            self._targets[0].view(-1).view(words),
            flag,
            self._table,
            EXPONENT=_EXPONENTS[self._dtype],
            ALIGNED=self._aligned,
            PIECES=_PIECES,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def is_aligned(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a copy can be made of vectors, seen from the start of its memory: those that cannot go into another table."""
    step = _ALIGNED_ELEMENTS * source.element_size()
    return not (source.data_ptr() % step or target.data_ptr() % step or source.numel() % _ALIGNED_ELEMENTS)


def can_copy(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether ``CopyTable`` takes the pair."""
    same = source.device == target.device and source.dtype == target.dtype and source.numel() == target.numel() > 0
    return same and source.is_cuda and source.dtype in _EXPONENTS and source.is_contiguous() and target.is_contiguous()


def checksum(words: torch.Tensor, period: int) -> torch.Tensor:
    """Sum of (1 + i mod period) x word_i in int64, modulo 2^64: [] int64. Args: words [n] int16 on a GPU, contiguous."""
    result = torch.zeros((), dtype=torch.int64, device=words.device)
    _checksum_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
        words, result, words.numel(), PERIOD=period, SUMMED=_SUMMED, BLOCK=_BLOCK, num_warps=8
    )
    return result


def has_fast_finite(tensor: torch.Tensor) -> bool:
    """Whether ``all_finite`` takes this tensor: BF16, FP16 or FP32, contiguous, on a GPU."""
    return tensor.is_cuda and tensor.dtype in _EXPONENTS and tensor.is_contiguous()


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether no element is Inf or NaN: [] bool. Args: tensor that ``has_fast_finite``."""
    result = torch.ones((), dtype=torch.bool, device=tensor.device)
    words = tensor.view(-1).view(_WORDS[tensor.element_size()])
    _finite_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
        words, result, words.numel(), EXPONENT=_EXPONENTS[tensor.dtype], BLOCK=_BLOCK, num_warps=8
    )
    return result
