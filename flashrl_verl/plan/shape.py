# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide over memory and speed, from its configuration alone."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from flashrl_verl.errors import ConfigError

_PROJECTION = re.compile(r"_proj\.weight$")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Elements of a model's weights, by what the rollout does with them, and the shape of its attention."""

    linear: int
    """Elements of projections that every token passes; quantized."""
    expert: int
    """Elements of all experts' projections together; quantized."""
    linear_rows: int
    """Output channels of both: each has a scale."""
    head: int
    """Elements of ``lm_head``, tied or not: every step reads it."""
    embedding: int
    """Elements of the token embedding that are stored beside the head; 0 when tied."""
    other: int
    """Norms, biases, routers and what else stays in BF16."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the widest gate-and-up projection of one token: both together, of all experts it is sent to."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    """Experts in a layer; 0 for a dense model."""
    experts_per_token: int

    @property
    def parameters(self) -> int:
        """Elements of all weights, a tied head once."""
        return self.linear + self.expert + self.head + self.embedding + self.other

    def kv_bytes_per_token(self, element_bytes: float, tensor_parallel: int) -> float:
        """Bytes of KV cache of one token on one GPU. KV heads are copied where there are fewer than GPUs."""
        return 2 * self.layers * math.ceil(self.kv_heads / tensor_parallel) * self.head_dim * element_bytes

    def experts_touched(self, tokens: float) -> float:
        """Share of the experts that a step of so many tokens reads, when routing is even: 1 - (1 - k/E)^tokens."""
        if not self.experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Count the weights of a model's shape (on the meta device: nothing is allocated).

    Raises:
        ConfigError: attention that keeps its KV cache in another form than per head, or no ``lm_head``.
    """
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError("--model has multi-head latent attention, which the rollout does not quantize")
    count: Counter[str] = Counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in model.named_parameters():
        kind = _kind(name, tensor.dim())
        count[kind] += tensor.numel()
        if kind in ("linear", "expert"):
            count["rows"] += tensor.numel() // tensor.shape[-1]
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if not count["head"] and not tied:
        raise ConfigError("--model has no lm_head: it does not generate text")
    heads = config.num_attention_heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    per_token = config.num_experts_per_tok if experts else 0
    width = getattr(config, "moe_intermediate_size", None) if experts else None
    return ModelShape(
        linear=count["linear"],
        expert=count["expert"],
        linear_rows=count["rows"],
        head=config.vocab_size * config.hidden_size,
        embedding=0 if tied else count["embedding"],
        other=count["other"],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=2 * (width or config.intermediate_size) * max(1, per_token),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        experts=experts,
        experts_per_token=per_token,
    )


def _kind(name: str, dimensions: int) -> str:
    if "embed_tokens" in name:
        return "embedding"
    if name.endswith("lm_head.weight"):
        return "head"
    if ".experts." in name and dimensions >= 2:  # transformers keeps all experts of a layer in one tensor
        return "expert"
    if dimensions == 2 and _PROJECTION.search(name):
        return "linear"
    return "other"
