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

from dataclasses import dataclass

import torch

SCALE_BYTES = 4


@dataclass(frozen=True)
class Pages:
    """Views of one layer's KV cache."""

    keys: torch.Tensor
    """Codes [pages, heads, slots, head_size] int8."""
    key_scales: torch.Tensor
    """[pages, heads, slots] float32."""
    values: torch.Tensor
    """Codes [pages, heads, head_size, slots] int8."""
    value_scales: torch.Tensor
    """[pages, heads, slots] float32."""

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    @property
    def head_size(self) -> int:
        return self.keys.shape[3]


def shape(pages: int, slots: int, heads: int, head_size: int) -> tuple[int, int, int, int, int]:
    """What vLLM is told that a layer's cache is: elements of one byte, as many as vLLM's own backend has for this
    format."""
    return pages, 2, slots, heads, head_size + SCALE_BYTES


def pages_of(cache: torch.Tensor) -> Pages:
    """The views of a cache.

    Args:
        cache: [pages, heads, slots, 2 * (head_size + 4)] int8, pages contiguous, as vLLM makes it since 0.29; before,
            ``shape``.
    """
    if cache.dim() == 4:
        pages, heads, slots, content = cache.shape
        head_size = content // 2 - SCALE_BYTES
    else:
        pages, _, slots, heads, padded = cache.shape
        head_size = padded - SCALE_BYTES
    codes, scales = heads * slots * head_size, heads * slots * SCALE_BYTES
    half = codes + scales
    flat = cache.view(pages, 2 * half)

    def scales_at(start: int) -> torch.Tensor:
        return flat[:, start : start + scales].view(torch.float32).unflatten(1, (heads, slots))

    return Pages(
        keys=flat[:, :codes].unflatten(1, (heads, slots, head_size)),
        key_scales=scales_at(codes),
        values=flat[:, half : half + codes].unflatten(1, (heads, head_size, slots)),
        value_scales=scales_at(half + codes),
    )
