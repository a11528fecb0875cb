# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache that follow the policy: bounds from the weights themselves, without calibration.

vLLM's ``kv_cache_dtype=fp8`` divides queries, keys and values by one scale a layer each before they become E4M3. The scales
are 1 unless a checkpoint brings others or, deprecated, the first batch is measured; none of these knows of a weight update, and
what exceeds 448 is clipped without a word.

Here they come from what every update brings. The input of a q/k/v projection is ``x = g * n`` with ``n`` of norm at most
``sqrt(d)``, as RMSNorm leaves it, so an output is bounded by Cauchy and Schwarz::

    |w_j . x + b_j|  <=  sqrt(d) * ||w_j * g||_2 + |b_j|

With a norm on queries and keys (Qwen3) it is ``sqrt(head_dim) * max |gain|`` instead. Rotary embeddings turn pairs of elements,
which adds a factor ``sqrt(2)`` (and YaRN's attention factor). A scale is the power of two that brings the bound to 448 or less:
nothing is clipped, whatever is sampled.

The bound is about ``sqrt(d)`` times the size of an ordinary element, and that costs nothing: E4M3 keeps its three bits of
mantissa over a range of 2^15, and a power of two moves only the exponent. What is below the bound by more is subnormal.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear

from flashrl_verl.config import KVCache
from flashrl_verl.quantization.row_norms import row_norms

E4M3_MAX = 448.0

READ_ON_USE = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales where they lie, at every call. FlashInfer takes them as numbers when a graph is
captured."""

_PRE_NORM = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
"""vLLM's attention modules whose q, k and v are known to be: RMSNorm of the layer, ``qkv_proj``, norms of q and k if there are
any, rotary embedding."""


@dataclass(frozen=True)
class _Layer:
    """One attention layer and what its q, k and v are made by."""

    attention: Attention
    projection: QKVParallelLinear
    input_norm: RMSNorm
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    turn: float
    """Most that the rotary embedding can enlarge an element by."""

    def bounds(self) -> torch.Tensor:
        """Most that |q|, |k| and |v| can be on this rank: [3] float32, no synchronization."""
        gains = self.input_norm.weight.data
        rows = row_norms(self.projection, gains) * math.sqrt(gains.numel())
        if self.projection.bias is not None:
            rows = rows + self.projection.bias.data.float().abs()
        attention = self.attention
        heads = (
            attention.num_heads * attention.head_size,
            attention.num_kv_heads * attention.head_size,
            attention.num_kv_heads * attention.head_size_v,
        )
        q, k, v = (part.amax() for part in rows.split(heads))
        q, k = (most if norm is None else _norm_bound(norm) for most, norm in ((q, self.q_norm), (k, self.k_norm)))
        return torch.stack((q * self.turn, k * self.turn, v))


class KVScales:
    """The scales of one model's KV cache.

    Args:
        model: a vLLM model whose layers ``unfollowed`` does not name.
    """

    def __init__(self, model: torch.nn.Module):
        modules = dict(model.named_modules())
        self._layers = [_layer(name, attention, modules) for name, attention in _one_scale_layers(modules)]
        self._scales: torch.Tensor | None = None
        self._targets = [
            scale
            for layer in self._layers
            for scale in (layer.attention._q_scale, layer.attention._k_scale, layer.attention._v_scale)
        ]

    def follow_weights(self) -> None:
        """Derive the scales from the model's weights and write them where the kernels read them; no synchronization."""
        if not self._layers:
            return
        self._scales = power_of_two_scales(torch.stack([layer.bounds() for layer in self._layers]))
        torch._foreach_copy_(self._targets, list(self._scales.flatten().unbind()))

    def poison(self) -> None:
        """Make the scales NaN, so that an update that does not write them shows."""
        for scale in self._targets:
            scale.fill_(float("nan"))

    def settle(self) -> dict[str, float] | None:
        """Hand the scales to the back ends that take them as numbers (synchronizes).

        Returns:
            The largest scale of queries, keys and values; None for a KV cache without scales of its own.

        Raises:
            ValueError: a scale is not finite: the weights are not.
        """
        if self._scales is None:
            return None
        scales = self._scales.tolist()
        for layer, (q, k, v) in zip(self._layers, scales, strict=True):
            attention = layer.attention
            attention._q_scale_float, attention._k_scale_float, attention._v_scale_float = q, k, v
            for name, scale in (("_k_scale_cpu", k), ("_v_scale_cpu", v)):
                if hasattr(attention, name):  # vLLM 0.24 has none
                    getattr(attention, name).fill_(scale)
        if not all(math.isfinite(value) for row in scales for value in row):
            raise ValueError("the weights give no finite bound of queries, keys and values: there is NaN or Inf among them")
        return {part: max(row[i] for row in scales) for i, part in enumerate("qkv")}


def power_of_two_scales(bounds: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two by which ``bounds`` divide to 448 or less.

    Args:
        bounds: any shape, float32, not negative.

    Returns:
        The same shape, float32; 1 for a bound of 0, NaN for one that is not finite.
    """
    mantissa, exponent = torch.frexp(bounds / E4M3_MAX)  # mantissa in [0.5, 1)
    scales = torch.ldexp(torch.ones_like(bounds), torch.where(mantissa == 0.5, exponent - 1, exponent))
    scales = torch.where(bounds == 0, torch.ones_like(scales), scales)
    return torch.where(bounds.isfinite(), scales, torch.full_like(scales, math.nan))


def kv_cache_state(model: torch.nn.Module) -> dict[str, Any]:
    """What a live model's KV cache is.

    Returns:
        ``dtypes``: attention layers by vLLM's name of their KV cache's dtype; ``backends``: names of their back ends;
        ``unfollowed``: layers with one scale whose scale cannot follow the weights, and why.
    """
    modules = dict(model.named_modules())
    layers = [(name, module) for name, module in modules.items() if isinstance(module, Attention)]
    dtypes: dict[str, int] = {}
    for _, layer in layers:
        dtypes[layer.kv_cache_dtype] = dtypes.get(layer.kv_cache_dtype, 0) + 1
    unfollowed = {name: _obstacle(name, layer, modules) for name, layer in _one_scale_layers(modules)}
    return {
        "dtypes": dtypes,
        "backends": sorted({layer.attn_backend.get_name() for _, layer in layers}),
        "unfollowed": {name: why for name, why in unfollowed.items() if why},
    }


def _one_scale_layers(modules: dict[str, torch.nn.Module]) -> list[tuple[str, Attention]]:
    return [(n, m) for n, m in modules.items() if isinstance(m, Attention) and m.kv_cache_dtype in KVCache.FP8.engine_names]


def _obstacle(name: str, attention: Attention, modules: dict[str, torch.nn.Module]) -> str | None:
    """Why the scale of a layer cannot follow its weights; None if it can."""
    backend = attention.attn_backend.get_name()
    if backend not in READ_ON_USE:
        return f"the attention backend {backend} does not read scales where they lie"
    block, around = (modules.get(part) for part in _parents(name))
    if type(block).__name__ not in _PRE_NORM:
        return f"no bound is known for {type(block).__name__}"
    if type(getattr(around, "input_layernorm", None)) is not RMSNorm:
        return "there is no RMSNorm in front of its projection"
    if getattr(block, "do_llama_4_scaling", False) or getattr(block, "dual_chunk_attention_config", None):
        return "its queries are scaled once more after the rotary embedding"
    if type(block.qkv_proj) is not QKVParallelLinear:
        return f"its projection is a {type(block.qkv_proj).__name__}"
    return None


def _parents(name: str) -> tuple[str, str]:
    """``model.layers.0.self_attn.attn`` -> its module, and the decoder layer around that."""
    block = name.rpartition(".")[0]
    return block, block.rpartition(".")[0]


def _layer(name: str, attention: Attention, modules: dict[str, torch.nn.Module]) -> _Layer:
    block, around = (modules[part] for part in _parents(name))
    return _Layer(
        attention=attention,
        projection=block.qkv_proj,
        input_norm=around.input_layernorm,
        q_norm=getattr(block, "q_norm", None),
        k_norm=getattr(block, "k_norm", None),
        turn=math.sqrt(2.0) * _attention_factor(block.rotary_emb),
    )


def _attention_factor(rotary: torch.nn.Module) -> float:
    """By how much a rotary embedding lengthens pairs: 1, or YaRN's attention factor."""
    cos, sin = rotary.cos_sin_cache.float().chunk(2, dim=-1)
    return float((cos.square() + sin.square()).amax().sqrt())


def _norm_bound(norm: RMSNorm) -> torch.Tensor:
    return norm.weight.data.float().abs().amax() * math.sqrt(norm.weight.numel())
