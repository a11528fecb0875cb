# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache that follow the policy: bounds from the weights themselves, without calibration.

vLLM's ``kv_cache_dtype=fp8`` divides queries, keys and values by one scale a layer each before they become E4M3. The scales
are 1 unless a checkpoint brings others or, deprecated, the first batch is measured; none of these knows of a weight update, and
what exceeds 448 is clipped without a word.

Here they come from what every update brings. The input of a q/k/v projection is ``x = g * n`` with ``n`` of norm at most
``sqrt(d)``, as RMSNorm leaves it, so an output is bounded by Cauchy and Schwarz::

    |w_j . x + b_j|  <=  sqrt(d) * ||w_j * g||_2 + |b_j|

With a norm on queries and keys (Qwen3) it is ``sqrt(head_dim) * max |gain|`` instead. Rotary embeddings turn pairs of elements,
which adds a factor ``sqrt(2)`` (and YaRN's attention factor). A projection in 8 bits multiplies a rounded ``x``, of which each
element is at most twice the exact one: the bound is doubled. A scale is the least power of two that brings the bound to 448 or
less: nothing is clipped, whatever is sampled.

The bound is some ``sqrt(d)`` times the size of an ordinary element. E4M3 keeps its three bits of mantissa over a range of
2^14.8 below 448, and a power of two moves only the exponent, so that rounding is that of a tight scale for everything that is
no more than about 2^6 (d = 5120) below the ordinary elements of the largest head; what is smaller loses bits.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear

from flashrl_verl.config import KVCache
from flashrl_verl.errors import FlashRLError
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.quantization.row_norms import row_norms

E4M3_MAX = 448.0

READ_ON_USE = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales at every call: a layer's tensors, or on a CPU its numbers, which ``settle`` sets.
FlashInfer takes numbers, and a CUDA graph keeps those of its capture."""

_PLAIN_ROPE = (
    *("RotaryEmbedding", "LinearScalingRotaryEmbedding", "DynamicNTKScalingRotaryEmbedding", "Llama3RotaryEmbedding"),
    "YaRNScalingRotaryEmbedding",
)
"""Rotary embeddings that turn pairs, with cosines beside sines in ``cos_sin_cache`` [positions, 2 x pairs]."""

_PRE_NORM = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
"""vLLM's attention modules whose q, k and v are known to be: RMSNorm of the layer, ``qkv_proj``, norms of q and k if there are
any, rotary embedding."""


@dataclass(frozen=True)
class _Layer:
    """One attention layer and what its q, k and v are made by."""

    name: str
    attention: Attention
    projection: QKVParallelLinear
    input_norm: RMSNorm
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    turn: float
    """Most that the rotary embedding can enlarge an element by."""

    def bounds(self) -> torch.Tensor:
        """Most that |q|, |k| and |v| can be on this rank: [3] float32, no synchronization."""
        attention = self.attention
        heads = (
            attention.num_heads * attention.head_size,
            attention.num_kv_heads * attention.head_size,
            attention.num_kv_heads * attention.head_size_v,
        )
        if self.q_norm is not None and self.k_norm is not None:  # only v is what the projection gives
            (v,) = self._row_bounds(heads[0] + heads[1]).split(heads[2:])
            q, k = _norm_bound(self.q_norm), _norm_bound(self.k_norm)
        else:
            q, k, v = (part.amax() for part in self._row_bounds(0).split(heads))
        return torch.stack((q * self.turn, k * self.turn, v.amax()))

    def _row_bounds(self, first: int) -> torch.Tensor:
        """Most that rows ``first`` and following of the projection can give: [rows] float32."""
        gains = self.input_norm.weight.data
        rounded = 2.0 if isinstance(self.projection.weight, QuantizedStorage) else 1.0
        rows = row_norms(self.projection, gains, first) * (math.sqrt(gains.numel()) * rounded)
        bias = self.projection.bias
        return rows if bias is None else rows + bias.data[first:].float().abs()


class KVScales:
    """The scales of one model's KV cache.

    Args:
        model: a vLLM model whose layers ``unfollowed`` does not name.
    """

    def __init__(self, model: torch.nn.Module):
        modules = dict(model.named_modules())
        turns: dict[int, float] = {}  # layers share their rotary embedding
        self._layers = [_layer(name, modules, turns) for name in _one_scale_layers(modules)]
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
            scale.fill_(math.nan)
        for layer in self._layers:
            _set_numbers(layer.attention, math.nan, math.nan, math.nan)

    def settle(self) -> list[str]:
        """Hand the scales to the back ends that take them as numbers (synchronizes).

        Returns:
            Names of the layers without a finite scale: their weights are not finite, or too large.
        """
        if self._scales is None:
            return []
        scales = self._scales.tolist()
        for layer, row in zip(self._layers, scales, strict=True):
            _set_numbers(layer.attention, *row)
        return [
            layer.name
            for layer, row in zip(self._layers, scales, strict=True)
            if not all(math.isfinite(scale) for scale in row)
        ]

    def restore(self) -> None:
        """Write the scales of the last update again; no synchronization.

        vLLM sets those of keys and values to 1 whenever the KV cache is given its memory back after sleep
        (``GPUModelRunner.init_fp8_kv_scales``), which verl does after every update.
        """
        if self._scales is not None:
            torch._foreach_copy_(self._targets, list(self._scales.flatten().unbind()))

    def live(self) -> dict[str, float] | None:
        """Read what the kernels read (synchronizes).

        Returns:
            The largest scale of queries, keys and values; None where no update has written any.

        Raises:
            FlashRLError: they are not what the last update made them.
        """
        if self._scales is None:
            return None
        found, meant = torch.stack(self._targets).view(-1, 3).tolist(), self._scales.tolist()
        for layer, row, right in zip(self._layers, found, meant, strict=True):
            if (
                row != right
                or [layer.attention._q_scale_float, layer.attention._k_scale_float, layer.attention._v_scale_float] != right
            ):
                raise FlashRLError(
                    f"flashrl.kv_cache=fp8: the scales of {layer.name} are {row} for queries, keys and values, and the last "
                    f"weight update made them {right}: something has reset them. Check `flashrl version`, or set "
                    "flashrl.kv_cache=auto"
                )
        return {part: max(row[i] for row in found) for i, part in enumerate("qkv")}


def _set_numbers(attention: Attention, q: float, k: float, v: float) -> None:
    attention._q_scale_float, attention._k_scale_float, attention._v_scale_float = q, k, v
    for name, scale in (("_k_scale_cpu", k), ("_v_scale_cpu", v)):
        if hasattr(attention, name):  # vLLM 0.24 has none
            getattr(attention, name).fill_(scale)


def power_of_two_scales(bounds: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two by which ``bounds`` divide to 448 or less.

    Args:
        bounds: any shape, float32, not negative.

    Returns:
        The same shape, float32; 1 for a bound of 0, NaN for one that is not finite.
    """
    mantissa, exponent = torch.frexp(bounds / E4M3_MAX)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    # The bits of 2^exponent: a power computed by floating point is exact on some devices only.
    scales = (exponent.clamp(-126, 127).to(torch.int32) + 127 << 23).view(torch.float32)
    scales = torch.where(bounds == 0, torch.ones_like(scales), scales)
    return torch.where(bounds.isfinite(), scales, torch.full_like(scales, math.nan))


def kv_cache_state(model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[str, Any]:
    """What a live model's KV cache is.

    Args:
        model: a vLLM model.
        layers: vLLM's own account of what has a cache (``compilation_config.static_forward_context``), by name. Some models
            keep attention layers where their modules do not show.

    Returns:
        ``dtypes``: attention layers by vLLM's name of their KV cache's dtype; ``backends``: names of their back ends;
        ``unfollowed``: layers with one scale whose scale cannot follow the weights, and why.
    """
    modules = dict(model.named_modules())
    attention = {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}
    dtypes = Counter(layer.kv_cache_dtype for layer in attention.values())
    scaled = [name for name, layer in attention.items() if layer.kv_cache_dtype in KVCache.FP8.engine_names]
    unfollowed = {name: _obstacle(name, attention[name], modules) for name in scaled}
    return {
        "dtypes": dict(dtypes),
        "backends": sorted({layer.attn_backend.get_name() for layer in attention.values()}),
        "unfollowed": {name: why for name, why in unfollowed.items() if why},
    }


def _one_scale_layers(modules: dict[str, torch.nn.Module]) -> list[str]:
    return [n for n, m in modules.items() if isinstance(m, Attention) and m.kv_cache_dtype in KVCache.FP8.engine_names]


def _obstacle(name: str, attention: Attention, modules: dict[str, torch.nn.Module]) -> str | None:
    """Why the scale of a layer cannot follow its weights; None if it can."""
    backend = attention.attn_backend.get_name()
    if backend not in READ_ON_USE:
        return (
            f"the attention backend {backend} keeps the scales that it first sees; "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN has one that does not"
        )
    if modules.get(name) is not attention:
        return "it is no module of the model, so nothing says which weights it belongs to"
    block, around = (modules.get(part) for part in _parents(name))
    if type(block).__name__ not in _PRE_NORM:
        return f"no bound is known for {type(block).__name__}"
    if type(getattr(around, "input_layernorm", None)) is not RMSNorm:
        return "there is no RMSNorm in front of its projection"
    if getattr(block, "do_llama_4_scaling", False) or getattr(block, "dual_chunk_attention_config", None):
        return "its queries are scaled once more after the rotary embedding"
    if type(block.qkv_proj) is not QKVParallelLinear:
        return f"its projection is a {type(block.qkv_proj).__name__}"
    if type(block.rotary_emb).__name__ not in _PLAIN_ROPE:
        return f"no bound is known for its rotary embedding, a {type(block.rotary_emb).__name__}"
    return None


def _parents(name: str) -> tuple[str, str]:
    """``model.layers.0.self_attn.attn`` -> its module, and the decoder layer around that."""
    block = name.rpartition(".")[0]
    return block, block.rpartition(".")[0]


def _layer(name: str, modules: dict[str, torch.nn.Module], turns: dict[int, float]) -> _Layer:
    block, around = (modules[part] for part in _parents(name))
    if id(block.rotary_emb) not in turns:
        turns[id(block.rotary_emb)] = math.sqrt(2.0) * _attention_factor(block.rotary_emb)
    return _Layer(
        name=name,
        attention=modules[name],
        projection=block.qkv_proj,
        input_norm=around.input_layernorm,
        q_norm=getattr(block, "q_norm", None),
        k_norm=getattr(block, "k_norm", None),
        turn=turns[id(block.rotary_emb)],
    )


def _attention_factor(rotary: torch.nn.Module) -> float:
    """By how much a rotary embedding lengthens pairs: 1, or YaRN's attention factor."""
    cos, sin = rotary.cos_sin_cache.float().chunk(2, dim=-1)
    return float((cos.square() + sin.square()).amax().sqrt())


def _norm_bound(norm: RMSNorm) -> torch.Tensor:
    return norm.weight.data.float().abs().amax() * math.sqrt(norm.weight.numel())
