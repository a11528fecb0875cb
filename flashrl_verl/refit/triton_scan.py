# SPDX-License-Identifier: Apache-2.0
"""The checksum and the search for NaN and Inf of ``scan.py`` on a GPU: one read of a tensor for both."""

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Words a program reads: two loads of 16 bytes a thread at 8 warps, four times."""

_SUMMED = 8
"""Weighted words added up in int32: 8 x 2^15 x 8191 is below 2^31."""


@triton.jit
def _scan_kernel(
    word_ptr, out_ptr, words, PERIOD: tl.constexpr, EXPONENT: tl.constexpr, STEP: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    values = tl.load(word_ptr + start + offsets, mask=start + offsets < words, other=0).to(tl.int32)
    weights = 1 + ((start % PERIOD).to(tl.int32) + offsets) % PERIOD
    # 64-bit multiplications and additions are several instructions each: most of the sum is made in 32 bits.
    few = tl.sum(tl.reshape(values * weights, [BLOCK // SUMMED, SUMMED]), 1)
    tl.atomic_add(out_ptr, tl.sum(few.to(tl.int64), 0))
    if EXPONENT > 0:
        # BLOCK is even: the words of an element that hold its exponent are the last of every STEP.
        bad = ((values & EXPONENT) == EXPONENT) & (offsets % STEP == STEP - 1)
        bad = tl.max(bad.to(tl.int32), 0)
        tl.store(out_ptr + 1, 1, mask=bad > 0)


def scan_on_gpu(words: torch.Tensor, out: torch.Tensor, period: int, exponent: int, step: int) -> None:
    """Add a tensor's checksum to ``out[0]``, and set ``out[1]`` to 1 where an element is NaN or Inf.

    Args:
        words: [n] int16, contiguous.
        out: [2] int64, zero before; nothing is copied to the host.
        period: after which the weights of the sum repeat.
        exponent: bits of the exponent in the word that holds it, all ones in NaN and Inf; 0 looks for none.
        step: words of an element.
    """
    grid = (triton.cdiv(words.numel(), _BLOCK),)
    _scan_kernel[grid](
        words,
        out,
        words.numel(),
        PERIOD=period,
        EXPONENT=exponent,
        STEP=step,
        SUMMED=_SUMMED,
        BLOCK=_BLOCK,
        num_warps=8,
    )
