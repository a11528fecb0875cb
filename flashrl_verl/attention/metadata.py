# SPDX-License-Identifier: Apache-2.0
"""What all layers of a step share: which new tokens are decoded, and which prompts are read together."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashrl_verl.attention.kernels import Plan


@dataclass
class Prefill:
    """Some sequences of a batch that one call of FlashAttention reads."""

    rows: slice
    """Sequences of the batch."""
    tokens: slice
    """New tokens of the batch."""
    query_starts: torch.Tensor
    """[sequences + 1] int32, from 0."""
    key_starts: torch.Tensor
    """[sequences + 1] int32: all tokens of each, the new ones last."""
    max_query_len: int
    max_seq_len: int
    total: int
    """Tokens of all sequences."""


@dataclass
class Metadata:
    """Of a step."""

    rows: int
    """New tokens that are decoded, which are the batch's first; with those that pad a CUDA graph."""
    prefills: list[Prefill]
    block_table: torch.Tensor
    """Of each sequence."""
    plan: "Plan"
    """Of these new tokens."""


def prefills_of(
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    first: int,
    at_once: int,
    to_device: Callable[[list[int]], torch.Tensor],
) -> list[Prefill]:
    """The sequences from ``first`` on, in groups.

    Args:
        query_starts: where each sequence's new tokens begin in the batch, and where the last one's end.
        seq_lens: tokens of each sequence, the new ones among them.
        first: sequence to begin with.
        at_once: most tokens of a group; one sequence alone may have more.
        to_device: makes an int32 tensor.
    """
    prefills, end = [], first
    while end < len(seq_lens):
        start, total = end, 0
        while end < len(seq_lens) and (end == start or total + seq_lens[end] <= at_once):
            total += seq_lens[end]
            end += 1
        queries = [query_starts[row] - query_starts[start] for row in range(start, end + 1)]
        keys = [0, *itertools.accumulate(seq_lens[start:end])]
        longest = max(after - before for before, after in zip(queries, queries[1:], strict=False))
        if longest > 0:  # else rows that pad the batch
            prefills.append(
                Prefill(
                    rows=slice(start, end),
                    tokens=slice(query_starts[start], query_starts[end]),
                    query_starts=to_device(queries),
                    key_starts=to_device(keys),
                    max_query_len=longest,
                    max_seq_len=max(seq_lens[start:end]),
                    total=total,
                )
            )
    return prefills
