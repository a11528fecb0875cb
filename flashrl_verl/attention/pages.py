# SPDX-License-Identifier: Apache-2.0
"""How a page of the KV cache holds codes and scales: laid out for the kernel that reads it every decode step.

vLLM gives a page ``2 * slots * heads * (head_size + 4)`` bytes for this format and leaves the order to the attention
backend (its own has a head's scale behind its codes: 132 bytes, so that few rows begin at a multiple of 16). Here a
page is, in bytes,

    keys    [heads, slots, head_size] INT8      scales [heads, slots] float32
    values  [heads, head_size, slots] INT8      scales [heads, slots] float32

Keys are multiplied along the head's dimensions and values along tokens: in this order the codes of both are read in
vectors of 16 bytes and are next to each other where a tensor core wants them, with no bytes to shuffle.
"""

import torch

SCALE_BYTES = 4


def shape(pages: int, slots: int, heads: int, head_size: int) -> tuple[int, int, int, int, int]:
    """What vLLM is told that a layer's cache is: elements of one byte, as many as vLLM's own backend has for this
    format."""
    return pages, 2, slots, heads, head_size + SCALE_BYTES


def geometry(cache: torch.Tensor) -> tuple[int, int, int]:
    """Heads, slots and head size of a cache. Its pages begin ``cache.stride(0)`` bytes apart.

    Args:
        cache: [pages, heads, slots, 2 * (head_size + 4)] int8, pages contiguous, as vLLM makes it since 0.29; before,
            ``shape``.
    """
    if cache.dim() == 4:
        _, heads, slots, content = cache.shape
        return heads, slots, content // 2 - SCALE_BYTES
    _, _, slots, heads, padded = cache.shape
    return heads, slots, padded - SCALE_BYTES
