# SPDX-License-Identifier: Apache-2.0
"""Which models our attention takes: plain numbers, asked before a run, by the plan and by vLLM."""

from typing import Any

NAME = "CUSTOM"
"""Of our backend in vLLM, the only one it leaves to others."""

HEAD_SIZES = (32, 64, 128, 256)
MAX_QUERIES_PER_KV = 32
"""Query heads of one KV head: more do not fit registers."""
CAPABILITY = 80
"""A100: what has INT8 and BF16 tensor cores and asynchronous copies."""

REMEDY = (
    "Set +actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN (vLLM's, slower), or "
    "flashrl.kv_cache=auto"
)


def why_not(head_size: int, heads: int, kv_heads: int) -> str | None:
    """Why layers of this shape are not taken; None if they are.

    Args:
        head_size: elements of a head.
        heads: query heads.
        kv_heads: key and value heads.
    """
    if head_size not in HEAD_SIZES:
        return f"heads of {head_size} elements (those of {', '.join(map(str, HEAD_SIZES))} are taken)"
    if heads > MAX_QUERIES_PER_KV * kv_heads:
        return f"{heads // kv_heads} query heads a KV head (up to {MAX_QUERIES_PER_KV} are taken)"
    return None


def why_not_model(config: dict[str, Any]) -> str | None:
    """The same of a model's ``config.json``, as far as it says. What else layers may have (a cap on logits) is found
    when the engine is built.

    Args:
        config: of a Hugging Face model.
    """
    if isinstance(window := config.get("sliding_window"), int):
        layers = config.get("layer_types")
        if "sliding_attention" in layers if layers else config.get("use_sliding_window", True):
            return f"a sliding window of {window} tokens"
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads, head_size = config.get("num_key_value_heads") or heads, config.get("head_dim")
    if head_size is None and isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
        head_size = hidden // heads
    if not all(isinstance(number, int) and number > 0 for number in (heads, kv_heads, head_size)):
        return None
    return why_not(head_size, heads, kv_heads)
