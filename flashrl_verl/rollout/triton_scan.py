# SPDX-License-Identifier: Apache-2.0
"""One pass over a tensor on a GPU: the receipt's checksum, and whether a value is not finite (``receipt.py`` defines both)."""

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""16-bit words a program reads: two loads of 16 bytes a thread at 8 warps, four times."""

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""Bits of the exponent in a 16-bit word; all ones mean Inf or NaN."""


@triton.jit
def _checksum_kernel(word_ptr, sum_ptr, words, PERIOD: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    values = tl.load(word_ptr + start + offsets, mask=start + offsets < words, other=0).to(tl.int64)
    weights = 1 + ((start % PERIOD).to(tl.int32) + offsets) % PERIOD
    tl.atomic_add(sum_ptr, tl.sum(values * weights, 0))


@triton.jit
def _finite_kernel(word_ptr, flag_ptr, words, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(word_ptr + offsets, mask=offsets < words, other=0).to(tl.int32)
    bad = tl.max(((values & EXPONENT) == EXPONENT).to(tl.int32), 0)
    tl.store(flag_ptr, False, mask=bad > 0)


def checksum(words: torch.Tensor, period: int) -> torch.Tensor:
    """Sum of (1 + i mod period) x word_i in int64, modulo 2^64: [] int64. Args: words [n] int16 on a GPU, contiguous."""
    result = torch.zeros((), dtype=torch.int64, device=words.device)
    _checksum_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
        words, result, words.numel(), PERIOD=period, BLOCK=_BLOCK, num_warps=8
    )
    return result


def has_fast_finite(tensor: torch.Tensor) -> bool:
    """Whether ``all_finite`` takes this tensor: 16-bit, contiguous, on a GPU."""
    return tensor.is_cuda and tensor.dtype in _EXPONENTS and tensor.is_contiguous()


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether no element is Inf or NaN: [] bool. Args: tensor that ``has_fast_finite``."""
    result = torch.ones((), dtype=torch.bool, device=tensor.device)
    words = tensor.view(-1).view(torch.int16)
    _finite_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
        words, result, words.numel(), EXPONENT=_EXPONENTS[tensor.dtype], BLOCK=_BLOCK, num_warps=8
    )
    return result
