# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens over INT8 keys and values in pages: a row is a token, with its sequence up to it.

A decode step of long responses waits for keys and values, so what counts is that reading half the bytes takes half the
time: codes go to tensor cores with about one instruction an element and no exchange between threads. Codes are FP16
there, which has every INT8 value; the scale of a key multiplies its score, the scale of a value its weight, and sums
are float32, so that weights have FP16's eleven bits, down to 2**-29 of the largest. (FlashAttention 3's E4M3 kernel
rounds queries and weights to four.)

Heads that share keys are the columns of a product whose rows are tokens: eight columns are the least that a tensor core
takes, where sixteen rows would be with heads and tokens the other way around.

Sequences are cut in splits for one program each, which another kernel merges (split-K attention, "Flash-Decoding",
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A step's splits are planned on the GPU, by an even share of
the whole batch: lengths have a long tail, and one program alone takes as long for the longest sequence as all programs
for the batch. A CUDA graph has programs for the most splits; those that have none end at once.
"""

import triton
import triton.language as tl

from flashrl_verl.attention.triton_pages import parts_of_page

_LOG2_E = tl.constexpr(1.4426950408889634)
_MOST = tl.constexpr(32768.0)


@triton.jit
def _halves(codes):
    """INT8 to FP16, exactly, four at once by bits: 1024 + 128 + x is the FP16 number 0x6400 + (128 + x)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 biased, bias;
        xor.b32 biased, $2, 0x80808080;
        mov.b32 bias, 0x64806480;
        prmt.b32 $0, biased, 0x64646464, 0x4140;
        prmt.b32 $1, biased, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, bias;
        sub.rn.f16x2 $1, $1, bias;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _query(q_ptr, row, heads, real, q_row, q_head, SIZE: tl.constexpr):
    """Queries [SIZE, columns] in FP16, and the power of two that they were divided by to fit: no bit of bfloat16 is
    lost, but of what is 2**-14 of the largest or less."""
    place = q_ptr + row * q_row + heads[None, :] * q_head + tl.arange(0, SIZE)[:, None]
    query = tl.load(place, mask=real[None, :], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.abs(query), 1), 0), 1e-30)
    unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (query / unit).to(tl.float16), unit


@triton.jit(do_not_specialize=["sequences", "halvings", "rows", "budget"])
def plan_kernel(
    query_starts_ptr, seq_lens_ptr, sequences, halvings, rows, budget, splits_ptr, starts_ptr, all_rows,
    TILE: tl.constexpr, LEAST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Cut what each of ``rows`` new tokens sees in as few splits as keep each within an even share: the tiles of all by
    ``budget``, and ``LEAST`` or more. So there are at most ``budget + rows``.

    Writes to ``splits_ptr`` [splits, 4] each split's row, sequence, first token and end, and to ``starts_ptr``
    [all_rows + 1] where each row's splits begin and, last, how many there are. Rows behind the batch's tokens have
    none. The sequences' starts must not decrease.
    """
    row = tl.arange(0, LANES)
    sequence, beyond = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32) + sequences
    for _ in range(halvings):  # the last sequence that begins at or before the row; the one behind all pads the batch
        middle = (sequence + beyond + 1) // 2
        begins = tl.load(query_starts_ptr + middle) <= row
        sequence, beyond = tl.where(begins, middle, sequence), tl.where(begins, beyond, middle - 1)
    is_token = (row < rows) & (sequence < sequences)
    behind = tl.load(query_starts_ptr + sequence + 1, mask=is_token, other=0) - row - 1
    end = tl.maximum(tl.load(seq_lens_ptr + sequence, mask=is_token, other=0) - behind, 0)
    end = tl.where(is_token, end, 0)
    tiles = tl.cdiv(end, TILE)
    splits = tl.cdiv(tiles, tl.maximum(tl.cdiv(tl.sum(tiles, 0), budget), LEAST))
    start = tl.cumsum(splits, 0) - splits
    tl.store(starts_ptr + row, start, mask=row <= all_rows)
    each = tl.cdiv(tiles, tl.maximum(splits, 1)) * TILE
    for split in range(tl.max(splits, 0)):
        place, real = splits_ptr + (start + split) * 4, split < splits
        tl.store(place, row, mask=real)
        tl.store(place + 1, sequence, mask=real)
        tl.store(place + 2, split * each, mask=real)
        tl.store(place + 3, tl.minimum(split * each + each, end), mask=real)


@triton.jit
def int8_attention_kernel(
    q_ptr, cache_ptr, table_ptr, splits_ptr, starts_ptr, sums_ptr, state_ptr, softmax_scale,
    all_rows, q_row, q_head, page_bytes, table_row,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Split (program 0) for the queries that share KV head (program 1), of a plan.

    Writes to ``sums_ptr`` [splits, heads, SIZE] float32 what the weights before normalization give, and to
    ``state_ptr`` [splits, heads, 2] the largest score and the sum of weights. ``GROUP`` of ``COLUMNS`` columns are
    queries.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    if split >= tl.load(starts_ptr + all_rows):
        return
    splits_ptr += split * 4
    row, sequence = tl.load(splits_ptr).to(tl.int64), tl.load(splits_ptr + 1).to(tl.int64)
    first, last = tl.load(splits_ptr + 2), tl.load(splits_ptr + 3)
    column, dimension, offset = tl.arange(0, COLUMNS), tl.arange(0, SIZE), tl.arange(0, TILE)
    real, heads = column < GROUP, head * GROUP + column
    query, unit = _query(q_ptr, row, heads, real, q_row, q_head, SIZE)
    factor = unit * softmax_scale * _LOG2_E

    table_ptr += sequence * table_row
    k_ptr, ks_ptr, v_ptr, vs_ptr = parts_of_page(cache_ptr, HEADS, SLOTS, SIZE)
    k_ptr, v_ptr = k_ptr + head * SLOTS * SIZE, v_ptr + head * SLOTS * SIZE
    ks_ptr, vs_ptr, page_scales = ks_ptr + head * SLOTS, vs_ptr + head * SLOTS, page_bytes // 4
    most = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    sums = tl.zeros([SIZE, COLUMNS], tl.float32)
    for start in tl.range(first, last, TILE):
        inside = start + offset < last
        slot = offset % SLOTS + (tl.multiple_of(start % SLOTS, TILE) if SLOTS > TILE else 0)
        page = tl.load(table_ptr + (start + offset) // SLOTS, mask=inside, other=0).to(tl.int64)
        # Slots of a page are neighbours, which a table's entry does not say by itself.
        page = tl.max_constancy(page, [SLOTS if SLOTS < TILE else TILE])
        keys = tl.load(k_ptr + (page * page_bytes + slot * SIZE)[:, None] + dimension[None, :])
        key_scales = tl.load(ks_ptr + page * page_scales + slot) * factor
        scores = tl.dot(_halves(keys), query) * key_scales[:, None]
        scores = tl.where(inside[:, None], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 0))
        weights = tl.exp2(scores - now[None, :])
        before = tl.exp2(most - now)
        total = total * before + tl.sum(weights, 0)
        value_scales = tl.load(vs_ptr + page * page_scales + slot, mask=inside, other=0.0)
        # By the tile's largest, and up to 2**15: small scales and weights would leave FP16's range.
        greatest = tl.maximum(tl.max(value_scales, 0), 1e-30) / _MOST
        weights = (weights * (value_scales / greatest)[:, None]).to(tl.float16)
        values = tl.load(v_ptr + (page * page_bytes + slot)[None, :] + dimension[:, None] * SLOTS)
        sums = sums * before[None, :] + tl.dot(_halves(values), weights) * greatest
        most = now

    place = split * HEADS * GROUP + heads
    tl.store(sums_ptr + place[None, :] * SIZE + dimension[:, None], sums, mask=real[None, :])
    tl.store(state_ptr + place * 2, most, mask=real)
    tl.store(state_ptr + place * 2 + 1, total, mask=real)


@triton.jit
def int8_attention_merge_kernel(
    sums_ptr, state_ptr, starts_ptr, out_ptr, out_row, out_head, SIZE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Sum the splits of row (program 0), head (program 1), each by its weight; of none zeros."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    dimension = tl.arange(0, SIZE)
    most, total = float("-inf"), 0.0
    result = tl.zeros([SIZE], tl.float32)
    for start in range(first, last, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        real, place = split < last, split * heads + head
        mosts = tl.load(state_ptr + place * 2, mask=real, other=float("-inf"))
        totals = tl.load(state_ptr + place * 2 + 1, mask=real, other=0.0)
        sums = tl.load(sums_ptr + place[:, None] * SIZE + dimension[None, :], mask=real[:, None], other=0.0)
        now = tl.maximum(most, tl.max(mosts, 0))
        weights, before = tl.exp2(mosts - now), tl.exp2(most - now)
        total = total * before + tl.sum(totals * weights, 0)
        result = result * before + tl.sum(sums * weights[:, None], 0)
        most = now
    result /= tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * out_row + head * out_head + dimension, result.to(out_ptr.dtype.element_ty))
