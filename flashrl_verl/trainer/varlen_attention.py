# SPDX-License-Identifier: Apache-2.0
"""The trainer's attention: FlashAttention 4 where it is installed, and without any flash-attn PyTorch's own.

verl packs a micro-batch's sequences into one row. SDPA then needs a mask and attends over the whole row's square: at
sequences of 8,192 tokens a layer of Qwen2.5-32B takes twice as long with it (docs/results/step.md). Transformers has an
interface to FlashAttention 4, but hands it a packed row's longest length as a tensor, which it does not take.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from verl.models.transformers.monkey_patch import repeat_kv
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from flashrl_verl.errors import ConfigError
from flashrl_verl.upstream.versions import version_of
from flashrl_verl.validation import VARLEN

_last: tuple[Any, torch.Tensor, int] | None = None


def register() -> None:
    """Make ``VARLEN`` known to transformers in this process."""
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over packed sequences, by transformers' interface for it.

    Args:
        module: the layer's attention.
        query: [1, heads, tokens, head size], BF16 or FP16; with Ulysses a rank's slice of the tokens.
        key: [1, KV heads, tokens, head size].
        value: as ``key``.
        attention_mask: none; verl removes the padding.
        dropout: none.
        scaling: of the scores; by default head size ** -0.5.
        sliding_window: keys that a query sees, itself among them; by default all before it.
        position_ids: [1, tokens] int64, 0 where a sequence begins.
        others: what transformers passes besides. `softcap`, `s_aux` and `head_mask` are refused, the rest is not read.

    Returns:
        [1, tokens, heads, head size], and no weights.

    Raises:
        ConfigError: the model or its settings want more than this.
    """
    refused = {"a mask (actor_rollout_ref.model.use_remove_padding=false)": attention_mask, "dropout": dropout or None}
    refused |= {name: others.get(name) for name in ("softcap", "s_aux", "head_mask")}
    refused["more than one row (actor_rollout_ref.model.use_remove_padding=false)"] = query.shape[0] > 1 or None
    refused["position_ids of more than one kind"] = True if position_ids is None or position_ids.dim() != 2 else None
    if unfit := [name for name, value in refused.items() if value is not None]:
        raise ConfigError(
            f"attn_implementation={VARLEN} does not take {', '.join(unfit)}. Remedy: "
            "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 with flash-attn, or sdpa"
        )
    ranks = get_ulysses_sequence_parallel_world_size()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if ranks > 1:  # as verl does around flash-attn: all tokens of some heads instead of some tokens of all
        copies = max(ranks // key.shape[2], 1)
        query, key, value = (
            gather_seq_scatter_heads(tensor, seq_dim=1, head_dim=2)
            for tensor in (query, repeat_kv(key, copies), repeat_kv(value, copies))
        )
    starts, longest = _sequences(position_ids, ranks)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    result = _attend(query[0], key[0], value[0], starts, longest, scaling, window)[None]
    return (gather_heads_scatter_seq(result, head_dim=2, seq_dim=1) if ranks > 1 else result), None


def _sequences(position_ids: torch.Tensor, ranks: int) -> tuple[torch.Tensor, int]:
    """Where sequences begin in all ranks' tokens, then the number of tokens, int32; and the longest's. All layers of a
    micro-batch share them."""
    global _last
    if _last is None or _last[0]() is not position_ids:
        positions = position_ids.flatten()
        if ranks > 1:
            parts = [torch.empty_like(positions) for _ in range(ranks)]
            torch.distributed.all_gather(parts, positions, group=get_ulysses_sequence_parallel_group())
            positions = torch.cat(parts)
        begins = positions.eq(0).nonzero().flatten()
        starts = torch.cat([begins, begins.new_tensor([positions.numel()])]).to(torch.int32)
        _last = weakref.ref(position_ids), starts, int(starts.diff().max())
    return _last[1], _last[2]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """[tokens, heads, head size] each."""
    if (flash_attention_4 := _flash_attention_4()) is not None:
        left = None if window[0] < 0 else window[0]
        return flash_attention_4(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scaling,
            causal=True,
            window_size=(left, window[1]),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )[0]
    from torch.nn.attention.varlen import varlen_attn

    # Before PyTorch 2.12 the argument is not there, and fewer KV heads are taken without it.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scaling, window_size=window, **grouped
    )


@cache
def _flash_attention_4() -> Callable | None:
    """``pip install flash-attn-4``, from Hopper on."""
    if version_of("flash-attn-4") is None or torch.cuda.get_device_capability()[0] < 9:
        return None
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func
