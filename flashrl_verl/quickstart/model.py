# SPDX-License-Identifier: Apache-2.0
"""A Qwen2 small enough to be trained on two CPU cores, with every kind of linear layer that FlashRL
quantizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM


def build_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    num_layers: int = 2,
    head_dim: int = 32,
    num_kv_heads: int = 2,
    initializer_range: float = 0.05,
) -> Qwen2ForCausalLM:
    """Build the model with random float32 weights.

    The embedding and the output head are separate, as in Qwen2.5-7B and larger, and both have
    `len(tokenizer)` rows.

    Args:
        tokenizer: gives the vocabulary's size and the ids at which a turn ends.
        seed: the weights are a function of this number only; the caller's random state is unchanged.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        head_dim: vLLM's CPU attention knows 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 and 512
            (`CPUAttentionBackend`).
        num_kv_heads: fewer than the query heads, so that the fused QKV projection has shards of different
            heights (GQA).
        initializer_range: standard deviation of the initial weights; Qwen's 0.02 learns more slowly at this
            width.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hf_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=initializer_range,
        # Low, because a sequence is 17 tokens long: with Qwen's 1e6 most dimensions would hardly turn and digits would
        # be harder to tell apart by position.
        rope_theta=100.0,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(hf_config)
