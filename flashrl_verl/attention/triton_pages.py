# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values into pages of INT8 codes, and reading them back; and where the parts of a page are."""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: added and taken away it leaves the nearest whole number, half to even, of what is below 2**22."""


@triton.jit
def parts_of_page(cache_ptr, HEADS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr):
    """Keys, their scales, values, their scales of the first page (``pages.py``)."""
    codes: tl.constexpr = HEADS * SLOTS * SIZE
    half: tl.constexpr = codes + HEADS * SLOTS * 4
    scales: tl.constexpr = tl.pointer_type(tl.float32)
    return cache_ptr, (cache_ptr + codes).to(scales), cache_ptr + half, (cache_ptr + half + codes).to(scales)


@triton.jit
def _codes(x):
    """INT8 codes of one vector and their scale, largest magnitude / 127; the scale of what is not finite is not a
    number."""
    largest = tl.max(tl.abs(x), 0)
    scale = tl.div_rn(largest, 127.0)
    codes = tl.where(largest > 0, (tl.div_rn(x, tl.where(largest > 0, scale, 1.0)) + _ROUND) - _ROUND, 0.0)
    finite = tl.sum(x * 0.0, 0) == 0.0  # a maximum passes NaN over
    scale = tl.where(finite, scale, float("nan"))
    return tl.where(finite, tl.minimum(tl.maximum(codes, -127.0), 127.0), 0.0).to(tl.int8), scale


@triton.jit
def write_kv_cache_kernel(
    key_ptr, value_ptr, slots_ptr, cache_ptr, key_row, key_head, value_row, value_head, page_bytes,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Key and value of token (program 0), head (program 1), to slot ``slots_ptr``[token]; a negative one is padding."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slots_ptr + token).to(tl.int64)
    if place >= 0:
        page, slot = place // SLOTS, place % SLOTS
        k_ptr, ks_ptr, v_ptr, vs_ptr = parts_of_page(cache_ptr + page * page_bytes, HEADS, SLOTS, SIZE)
        dimension = tl.arange(0, SIZE)
        scales, codes = head * SLOTS + slot, head * SLOTS * SIZE
        key, scale = _codes(tl.load(key_ptr + token * key_row + head * key_head + dimension).to(tl.float32))
        tl.store(k_ptr + codes + slot * SIZE + dimension, key)
        tl.store(ks_ptr + scales, scale)
        value, scale = _codes(tl.load(value_ptr + token * value_row + head * value_head + dimension).to(tl.float32))
        tl.store(v_ptr + codes + dimension * SLOTS + slot, value)
        tl.store(vs_ptr + scales, scale)


@triton.jit
def read_kv_cache_kernel(
    cache_ptr, table_ptr, starts_ptr, key_ptr, value_ptr, page_bytes, table_row, out_row, out_head,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values of tile (program 1) of sequence (program 0), head (program 2), one sequence after another from
    ``starts_ptr`` [sequences + 1]."""
    sequence, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    if tile * TILE < length:
        offset, dimension = tl.arange(0, TILE), tl.arange(0, SIZE)
        slot = offset % SLOTS + (tile * TILE % SLOTS if SLOTS > TILE else 0)
        inside = tile * TILE + offset < length
        entries = table_ptr + sequence.to(tl.int64) * table_row + (tile * TILE + offset) // SLOTS
        page = tl.load(entries, mask=inside, other=0).to(tl.int64)
        page = tl.max_constancy(page, [SLOTS if SLOTS < TILE else TILE])
        k_ptr, ks_ptr, v_ptr, vs_ptr = parts_of_page(cache_ptr, HEADS, SLOTS, SIZE)
        codes, scales = page * page_bytes + head * SLOTS * SIZE, page * (page_bytes // 4) + head * SLOTS + slot
        rows = (start.to(tl.int64) + tile * TILE + offset) * out_row + head * out_head
        keys = tl.load(k_ptr + (codes + slot * SIZE)[:, None] + dimension[None, :], mask=inside[:, None], other=0)
        keys = keys.to(tl.float32) * tl.load(ks_ptr + scales, mask=inside, other=0.0)[:, None]
        tl.store(key_ptr + rows[:, None] + dimension[None, :], keys.to(key_ptr.dtype.element_ty), mask=inside[:, None])
        values = tl.load(v_ptr + (codes + slot)[None, :] + dimension[:, None] * SLOTS, mask=inside[None, :], other=0)
        values = values.to(tl.float32) * tl.load(vs_ptr + scales, mask=inside, other=0.0)[None, :]
        tl.store(
            value_ptr + rows[None, :] + dimension[:, None], values.to(value_ptr.dtype.element_ty), mask=inside[None, :]
        )
