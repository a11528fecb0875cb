# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide over memory, from its configuration alone."""

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from flashrl_verl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Elements of a model's weights, by how an engine keeps them, and the shape of its layers."""

    projections: int
    """Of all layers and experts: quantized."""
    channels: int
    """Their output channels: in 8 bits each has a scale."""
    embeddings: int
    """Token embedding and ``lm_head``, once where they are tied: BF16, divided among an engine's GPUs."""
    other: int
    """Norms, biases and routers: BF16, whole on every GPU."""
    config: PretrainedConfig
    width: int
    """Rows of one gate projection, which tensor parallelism cuts."""
    gates: int
    """Of a layer, for one token: 1, or the experts that it is sent to."""
    kv_heads: int
    head_dim: int
    experts: int
    """Experts in a layer; 0 for a dense model."""

    @property
    def parameters(self) -> int:
        """Elements of all weights, a tied head once."""
        return self.projections + self.embeddings + self.other

    def divides(self, size: int) -> bool:
        """vLLM's conditions for engines of so many GPUs (vllm/model_executor/models/qwen2.py, layers/linear.py)."""
        kv = self.kv_heads % size == 0 or size % self.kv_heads == 0
        return kv and self.config.num_attention_heads % size == 0 and self.width % size == 0


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Count the weights of a model's shape (on the meta device: nothing is allocated).

    Raises:
        ConfigError: it is not a decoder of ``*_proj`` layers and full attention.
    """
    _require_full_attention(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # noqa: BLE001 - transformers raises several kinds, of many lines
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--model: transformers cannot build it as a language model: {line}") from error
    count, other = Counter(), Counter()
    for name, tensor in model.named_parameters():
        if "embed_tokens" in name or name.endswith("lm_head.weight"):
            count["embeddings"] += tensor.numel()
        elif tensor.dim() >= 2 and (name.endswith("_proj.weight") or ".experts." in name):
            count["projections"] += tensor.numel()
            count["channels"] += tensor.numel() // tensor.shape[-1]  # all experts of a layer are one tensor
        else:
            other[name] = tensor.numel()
    share = other.total() / (count["embeddings"] + count["projections"] + other.total())
    if share > 0.01:  # norms, biases and routers have a few per mille
        raise ConfigError(
            f"--model: {share:.0%} of its weights are in layers of another kind than *_proj, such as "
            f"{other.most_common(1)[0][0]}, whose size in 8 bits is not known here"
        )
    heads = config.num_attention_heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    return ModelShape(
        **count,
        other=other.total(),
        config=config,
        width=(getattr(config, "moe_intermediate_size", None) if experts else None) or config.intermediate_size,
        gates=config.num_experts_per_tok if experts else 1,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        experts=experts,
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
