# SPDX-License-Identifier: Apache-2.0
"""The quantization config vLLM knows as ``flashrl``: which layers are 8-bit and which stay as they are.

It travels to every vLLM process inside the engine arguments (``hf_overrides["quantization_config"]``), never through
the environment.
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from flashrl_verl.attention import kv_cache_arguments, require_kv_kernel
from flashrl_verl.attention.equalize import install
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.experts import QuantizedMoEMethod, UnpackedMoEMethod
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.linear import Fp32HeadMethod, QuantizedLinearMethod, UnpackedLinearMethod
from flashrl_verl.quantization.selection import LayerSelection, expert_parts, fused_parts
from flashrl_verl.settings import FlashRLConfig

NAME = "flashrl"

GRAPH = "graph", 1
"""In the engine's configuration, raised when layers compute something else with the same settings: vLLM finds a
compiled model by its configuration and the files it was traced through, and would not miss a hook in a new file."""

QUANTIZED_LAYERS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Exact types, not subclasses: their loaders are known to go through the parameter. ``ReplicatedLinear`` (a MoE router)
``copy_``s behind the parameter's back, which would truncate BF16 into 8-bit storage."""


@register_quantization_config(NAME)
class FlashRLQuantizationConfig(QuantizationConfig):
    """8-bit codes (or none) for ``QUANTIZED_LAYERS`` and fused experts; everything else keeps the model's dtype.

    Args:
        settings: ``kv_cache`` is only checked; the engine argument ``kv_cache_dtype`` sets it.

    Raises:
        ConfigError: nothing computes with such a KV cache here.
    """

    def __init__(self, settings: FlashRLConfig):
        super().__init__()
        require_kv_kernel(settings.kv_cache)
        self.fp32_lm_head = settings.fp32_lm_head
        self.precision = settings.precision
        self.format = weight_format(settings.precision, settings.rotation)
        self.selection = LayerSelection(ignore=settings.ignore)

    def __repr__(self) -> str:
        return f"FlashRLQuantizationConfig(precision={self.precision.value})"

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # Ampere, the least that any format needs; `gemm.choose_kernel` decides per format

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlashRLQuantizationConfig":
        config = {key: value for key, value in config.items() if key not in ("quant_method", GRAPH[0])}
        try:
            return cls(FlashRLConfig(**config))
        except TypeError as error:
            raise ConfigError(f"the quantization config {config!r} is not FlashRL's: {error}") from error

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            if self.quantizes(layer, prefix):
                return QuantizedLinearMethod(self.format)
            return UnpackedLinearMethod() if current_platform.is_cpu() else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            if self.quantizes(layer, prefix):
                return QuantizedMoEMethod(self.format, layer.moe_config, prefix)
            return UnpackedMoEMethod(layer.moe_config) if current_platform.is_cpu() else None
        if isinstance(layer, VocabParallelEmbedding):
            self.selection.keeps(prefix, [])
            # An embedding too: where it is tied, many models multiply by the embedding layer itself.
            return Fp32HeadMethod() if self.fp32_lm_head else None
        if isinstance(layer, Attention) and is_quantized_kv_cache(layer.kv_cache_dtype):
            install(layer)
            return None
        if isinstance(layer, MLAAttention):
            # It derives tensors from kv_b_proj after loading; whether they stay where CUDA graphs read them is not
            # tested.
            raise ConfigError(
                f"{prefix}: this rollout does not support multi-head latent attention in any flashrl.precision; use "
                "verl's, actor_rollout_ref.rollout.name=vllm with trainer.v1.trainer_mode=sync"
            )
        return None  # attention, and above embeddings and lm_head, use vLLM's own unquantized method

    def parts(self, layer: LinearBase | RoutedExperts, prefix: str) -> list[str]:
        """The checkpoint's names of the layers that vLLM keeps in this one; empty where it fuses none."""
        if isinstance(layer, RoutedExperts):
            return expert_parts(prefix, layer.moe_config.num_experts)
        return fused_parts(prefix, self.packed_modules_mapping)

    def quantizes(self, layer: LinearBase | RoutedExperts, prefix: str) -> bool:
        """Whether a layer gets 8-bit codes.

        Args:
            layer: one of vLLM's.
            prefix: its name.

        Raises:
            ConfigError: ``ignore`` names some of the fused parts only.
        """
        # Ask about every layer, also those that are never quantized, so that their entries of `ignore` count as used.
        kept = self.selection.keeps(prefix, self.parts(layer, prefix))
        return (
            self.format is not None
            and (isinstance(layer, RoutedExperts) or type(layer) in QUANTIZED_LAYERS)
            and not kept
        )


def engine_arguments(settings: FlashRLConfig, **given: Any) -> dict[str, Any]:
    """Arguments of a vLLM engine in these formats, for ``vllm.LLM``, and the given ones, which win; the plugin has to
    be registered."""
    return {
        "quantization": NAME,
        "hf_overrides": {"quantization_config": quantization_config_dict(settings)},
        **kv_cache_arguments(settings.kv_cache, given),
    }


def quantization_config_dict(settings: FlashRLConfig) -> dict[str, Any]:
    """What goes into the engine's ``hf_overrides["quantization_config"]``."""
    return {
        "quant_method": NAME,
        GRAPH[0]: GRAPH[1],
        "precision": settings.precision.value,
        "rotation": settings.rotation,
        "ignore": list(settings.ignore),
        "fp32_lm_head": settings.fp32_lm_head,
        "kv_cache": settings.kv_cache.value,
    }
