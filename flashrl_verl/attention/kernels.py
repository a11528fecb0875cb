# SPDX-License-Identifier: Apache-2.0
"""The kernels as functions of tensors: write to pages, read back, decode. A row is a new token that is decoded."""

from dataclasses import dataclass

import torch
import triton

from flashrl_verl.attention.pages import geometry
from flashrl_verl.attention.triton_decode import fill_rows_kernel, int8_attention_kernel, int8_attention_merge_kernel
from flashrl_verl.attention.triton_pages import read_kv_cache_kernel, write_kv_cache_kernel

_TILE, _WARPS, _STAGES = 64, 2, 3
"""The fastest of a dozen on an H200, at 28 sequences of 8287 tokens, 40 heads of 128 over 8: docs/LOG.md."""
_PROGRAMS_PER_SM = 8
"""As many as its registers hold of this size."""
_MOST_SPLITS = 32


@dataclass(frozen=True)
class Scratch:
    """Workspace between the split and the merge kernel; all layers share one."""

    sums: torch.Tensor
    """float32: values that the weights of each split give."""
    state: torch.Tensor
    """float32: the largest score and the sum of weights of each split."""
    multiprocessors: int

    @staticmethod
    def make(rows: int, heads: int, kv_heads: int, head_size: int, device: torch.device) -> "Scratch":
        """For steps of up to so many rows.

        Args:
            rows: most in a step.
            heads: query heads.
            kv_heads: key and value heads.
            head_size: elements of a head.
            device: of the KV cache.
        """
        on_gpu = device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        splits = {n: splits_of(n, kv_heads, multiprocessors) for n in range(1, rows + 1)}
        parts = heads * max((n * count for n, count in splits.items() if count > 1), default=0)
        return Scratch(
            sums=torch.empty(parts * head_size, dtype=torch.float32, device=device),
            state=torch.empty(parts * 2, dtype=torch.float32, device=device),
            multiprocessors=multiprocessors,
        )


def splits_of(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts that each row's sequence is cut in, a power of two: by the batch alone, so that a CUDA graph of it stays
    right."""
    wanted = max(1, multiprocessors * _PROGRAMS_PER_SM // (rows * kv_heads))
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantize keys and values into their slots, each by the largest magnitude of its head's vector, half to even.

    Args:
        key: [tokens or more, heads, head_size], 16 or 32 bits.
        value: alike.
        cache: of the layer, as ``pages.geometry`` takes it.
        slot_mapping: [tokens] int64, page * slots + slot; negative ones are left out.
    """
    if not len(slot_mapping):
        return
    heads, slots, size = geometry(cache)
    write_kv_cache_kernel[(len(slot_mapping), heads)](
        *(key, value, slot_mapping, cache),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1), cache.stride(0)),
        HEADS=heads,
        SLOTS=slots,
        SIZE=size,
        num_warps=1,
    )


def read(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    max_seq_len: int,
    total: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of sequences, one after another.

    Args:
        cache: of the layer.
        block_table: [sequences, pages of the longest or more] int32.
        starts: [sequences + 1] int32, where each begins in the result.
        max_seq_len: tokens of the longest.
        total: tokens of all.
        dtype: of the result.

    Returns:
        Two of [total, heads, head_size].
    """
    heads, slots, size = geometry(cache)
    key, value = torch.empty(2, total, heads, size, dtype=dtype, device=block_table.device)
    read_kv_cache_kernel[(len(starts) - 1, triton.cdiv(max_seq_len, _TILE), heads)](
        *(cache, block_table, starts, key, value),
        *(cache.stride(0), block_table.stride(0), key.stride(0), key.stride(1)),
        HEADS=heads,
        SLOTS=slots,
        SIZE=size,
        TILE=_TILE,
    )
    return key, value


def fill_rows(query_starts: torch.Tensor, seq_lens: torch.Tensor, sequences: torch.Tensor, up_to: torch.Tensor) -> None:
    """Of each new token its sequence, and the tokens of this up to it; of what pads the batch 0.

    Args:
        query_starts: [sequences + 1] int32, where each sequence's new tokens begin in the batch.
        seq_lens: [sequences] int32, the new tokens among them.
        sequences: [tokens or more] int32, written.
        up_to: alike.
    """
    fill_rows_kernel[(len(query_starts),)](query_starts, seq_lens, sequences, up_to, len(up_to), TILE=128)


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    scratch: Scratch,
    sequences: torch.Tensor | None = None,
) -> None:
    """Attention of each row's query over its sequence, up to itself.

    Args:
        query: [rows, heads, head_size], 16 bits.
        cache: of the layer.
        block_table: [sequences or more, pages] int32.
        seq_lens: [rows or more] int32, the new token among them; 0 gives zeros.
        softmax_scale: of the scores.
        out: like query, written.
        scratch: for so many rows.
        sequences: [rows or more] int32, rows of ``block_table``; None: row i has the i-th.
    """
    rows, heads, size = query.shape
    if not rows:
        return
    kv_heads, slots, _ = geometry(cache)
    group, splits = heads // kv_heads, splits_of(rows, kv_heads, scratch.multiprocessors)
    parts = rows * heads * splits
    if splits > 1 and (parts * size > scratch.sums.numel() or parts * 2 > scratch.state.numel()):
        raise RuntimeError(f"{rows} rows of {heads} heads in {splits} splits are more than the scratch was made for")
    int8_attention_kernel[(rows, kv_heads, splits)](
        *(query, cache, block_table, sequences, seq_lens, out, scratch.sums, scratch.state, softmax_scale),
        *(query.stride(0), query.stride(1), cache.stride(0), block_table.stride(0), out.stride(0), out.stride(1)),
        HEADS=kv_heads,
        SLOTS=slots,
        SIZE=size,
        GROUP=group,
        COLUMNS=max(8, triton.next_power_of_2(group)),
        TILE=_TILE,
        DIRECT=splits == 1,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    if splits > 1:
        int8_attention_merge_kernel[(rows, heads)](
            scratch.sums, scratch.state, out, out.stride(0), out.stride(1), SIZE=size, SPLITS=splits, num_warps=2
        )
