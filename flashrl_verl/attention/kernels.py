# SPDX-License-Identifier: Apache-2.0
"""The kernels as functions of tensors: write to pages, read back, decode. A row is a new token that is decoded."""

from dataclasses import dataclass

import torch
import triton

from flashrl_verl.attention.pages import geometry
from flashrl_verl.attention.triton_decode import int8_attention_kernel, int8_attention_merge_kernel, plan_kernel
from flashrl_verl.attention.triton_pages import read_kv_cache_kernel, write_kv_cache_kernel

_TILE, _WARPS, _STAGES = 64, 2, 3
"""The fastest of a dozen on an H200, over batches of 1 to 256 sequences of two shapes: docs/LOG.md."""
_SPLITS_PER_SM = 16
"""Aimed at: twice the programs that fit; the fastest of 8, 16, 24 and 32."""
_LEAST_TILES = 4
"""A sequence of no more is not cut; the fastest of 1, 2, 4 and 8."""


@dataclass(frozen=True)
class Plan:
    """How a step's sequences are cut in splits, and room for what these give; all layers share one."""

    rows: int
    """Most new tokens that are decoded in a step."""
    splits: torch.Tensor
    """[splits, 4] int32: of each its row, its sequence, its first token and its end."""
    starts: torch.Tensor
    """[rows + 1] int32: where each row's splits begin; last, how many there are."""
    sums: torch.Tensor
    """[splits, heads, head_size] float32: values that the weights of each split give."""
    state: torch.Tensor
    """[splits, heads, 2] float32: the largest score and the sum of weights of each split."""
    budget: int
    """Splits aimed at, for one KV head."""

    @staticmethod
    def make(rows: int, heads: int, kv_heads: int, head_size: int, device: torch.device) -> "Plan":
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
        budget = triton.cdiv(multiprocessors * _SPLITS_PER_SM, kv_heads)
        splits = rows + budget
        return Plan(
            rows=rows,
            splits=torch.zeros(splits, 4, dtype=torch.int32, device=device),
            starts=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            sums=torch.empty(splits, heads, head_size, dtype=torch.float32, device=device),
            state=torch.empty(splits, heads, 2, dtype=torch.float32, device=device),
            budget=budget,
        )

    def fill(self, query_starts: torch.Tensor, seq_lens: torch.Tensor, rows: int) -> None:
        """Plan a step, whose first new tokens are decoded, each over its sequence up to itself.

        Args:
            query_starts: [sequences + 1] int32, where each sequence's new tokens begin in the batch; not decreasing.
            seq_lens: [sequences] int32, the new tokens among them.
            rows: new tokens that are decoded; what is behind the last sequence pads the batch.

        Raises:
            RuntimeError: more rows than the plan was made for.
        """
        if rows > self.rows:
            raise RuntimeError(f"{rows} rows are more than the {self.rows} that the plan was made for")
        sequences = len(query_starts) - 1
        plan_kernel[(1,)](
            *(query_starts, seq_lens, sequences, sequences.bit_length(), rows, self.budget),
            *(self.splits, self.starts, self.rows),
            TILE=_TILE,
            LEAST=_LEAST_TILES,
            LANES=triton.next_power_of_2(self.rows + 1),
            num_warps=8,
        )


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


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of each row's query over its sequence, up to itself.

    Args:
        query: [rows, heads, head_size], 16 bits.
        cache: of the layer.
        block_table: [sequences or more, pages] int32.
        plan: of the step; rows that it does not have give zeros.
        softmax_scale: of the scores.
        out: like query, written.
    """
    rows, heads, size = query.shape
    if not rows:
        return
    kv_heads, slots, _ = geometry(cache)
    group = heads // kv_heads
    int8_attention_kernel[(rows + plan.budget, kv_heads)](  # the most splits: a CUDA graph stays right
        *(query, cache, block_table, plan.splits, plan.starts, plan.sums, plan.state, softmax_scale, plan.rows),
        *(query.stride(0), query.stride(1), cache.stride(0), block_table.stride(0)),
        HEADS=kv_heads,
        SLOTS=slots,
        SIZE=size,
        GROUP=group,
        COLUMNS=max(8, triton.next_power_of_2(group)),
        TILE=_TILE,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    int8_attention_merge_kernel[(rows, heads)](
        *(plan.sums, plan.state, plan.starts, out, out.stride(0), out.stride(1)), SIZE=size, AT_ONCE=16, num_warps=2
    )
