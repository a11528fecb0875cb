# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide over memory and speed, from its configuration alone."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from flashrl_verl.errors import ConfigError

_OTHER_SHARE = 0.01
"""Norms, biases and routers have a few per mille of a model's weights."""


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
    width: int
    """Rows of one gate projection, which tensor parallelism cuts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    """Experts in a layer; 0 for a dense model."""
    experts_per_token: int

    @property
    def sent(self) -> int:
        """Elements that the trainer sends in a weight update: a tied head too, though the rollout then leaves it
        alone."""
        return self.parameters + (0 if self.embedding else self.head)

    @property
    def parameters(self) -> int:
        """Elements of all weights, a tied head once."""
        return self.linear + self.expert + self.head + self.embedding + self.other

    def kv_bytes_per_token(self, element_bytes: float, tensor_parallel: int) -> float:
        """Bytes of KV cache of one token on one GPU. KV heads are copied where there are fewer than GPUs."""
        return 2 * self.layers * math.ceil(self.kv_heads / tensor_parallel) * self.head_dim * element_bytes

    @property
    def active(self) -> float:
        """Elements of linear layers that one token is multiplied by: of the experts, those it is sent to."""
        return self.linear + (self.expert * self.experts_per_token / self.experts if self.experts else 0.0)

    def attention_operations(self, tokens: float, length: float) -> float:
        """Floating-point operations of causal attention in all layers: two products of 2 each, over half of the length.

        Args:
            tokens: in all.
            length: tokens of each sequence, the mean over tokens.
        """
        return 2 * self.layers * self.heads * self.head_dim * length * tokens

    def experts_touched(self, tokens: float) -> float:
        """Share of the experts that a step of so many tokens reads, when routing is even: 1 - (1 - k/E)^tokens."""
        if not self.experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Count the weights of a model's shape (on the meta device: nothing is allocated).

    Raises:
        ConfigError: it is not a decoder of ``*_proj`` layers and full attention, whose time is known here.
    """
    _require_full_attention(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # noqa: BLE001 - transformers raises several kinds, of many lines
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--model: transformers cannot build it as a language model: {line}") from error
    count: Counter[str] = Counter()
    others = []
    for name, tensor in model.named_parameters():
        kind = _kind(name, tensor.dim())
        count[kind] += tensor.numel()
        if kind in ("linear", "expert"):
            count["rows"] += tensor.numel() // tensor.shape[-1]
        elif kind == "other":
            others.append((tensor.numel(), name))
    whole = sum(count[kind] for kind in ("linear", "expert", "head", "embedding", "other"))
    if count["other"] > _OTHER_SHARE * whole:
        raise ConfigError(
            f"--model: {count['other'] / whole:.0%} of its weights are in layers of another kind than *_proj, such as "
            f"{max(others)[1]}, whose time is not known here"
        )
    tied = bool(getattr(config, "tie_word_embeddings", False))
    heads = config.num_attention_heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    per_token = config.num_experts_per_tok if experts else 0
    width = (getattr(config, "moe_intermediate_size", None) if experts else None) or config.intermediate_size
    return ModelShape(
        linear=count["linear"],
        expert=count["expert"],
        linear_rows=count["rows"],
        head=config.vocab_size * config.hidden_size,
        embedding=0 if tied else count["embedding"],
        other=count["other"],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=2 * width * max(1, per_token),
        width=width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        experts=experts,
        experts_per_token=per_token,
    )


def _require_full_attention(config: PretrainedConfig) -> None:
    for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if getattr(config, name, None) is None:
            raise ConfigError(
                f"--model: its configuration has no {name}; a decoder like Qwen2.5, Llama or Qwen3-MoE is needed"
            )
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError("--model has multi-head latent attention, which the rollout does not quantize")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        words = ", ".join(sorted(kinds)) or "a sliding window"
        raise ConfigError(f"--model has attention of another kind ({words}), whose KV cache is not planned here")


def _kind(name: str, dimensions: int) -> str:
    if "embed_tokens" in name:
        return "embedding"
    if name.endswith("lm_head.weight"):
        return "head"
    if ".experts." in name and dimensions >= 2:  # transformers keeps all experts of a layer in one tensor
        return "expert"
    if dimensions == 2 and name.endswith("_proj.weight"):
        return "linear"
    return "other"
