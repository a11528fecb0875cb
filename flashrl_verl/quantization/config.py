# SPDX-License-Identifier: Apache-2.0
"""The quantization config vLLM knows as ``flashrl``: which layers are INT8 and which stay as they are.

It travels to every vLLM process inside the engine arguments (``hf_overrides["quantization_config"]``), never through the
environment.
"""

from typing import Any

import torch
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
from vllm.platforms import current_platform

from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.linear import Int8LinearMethod, UnpackedLinearMethod

NAME = "flashrl"

QUANTIZED_LAYERS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Exact types, not subclasses: their loaders are known to go through the parameter. ``ReplicatedLinear`` (a MoE router) and
fused experts ``copy_`` behind the parameter's back, which would truncate BF16 into int8 storage."""


@register_quantization_config(NAME)
class FlashRLQuantizationConfig(QuantizationConfig):
    """Row-wise INT8 (or none) for the layers in ``QUANTIZED_LAYERS``; everything else keeps the model's dtype."""

    def __init__(self, precision: Precision):
        super().__init__()
        self.precision = precision

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
        return 75  # Turing: the first with INT8 tensor cores that vLLM's CUTLASS kernels cover

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlashRLQuantizationConfig":
        try:
            return cls(Precision(config["precision"]))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the quantization config {config!r} names no known precision; set flashrl.precision to one of "
                f"{[p.value for p in Precision]}"
            ) from error

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            if self.precision is Precision.INT8 and type(layer) in QUANTIZED_LAYERS:
                return Int8LinearMethod()
            return UnpackedLinearMethod() if current_platform.is_cpu() else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts) and self.precision is Precision.INT8:
            raise ConfigError(
                f"{prefix}: flashrl.precision=int8 does not quantize mixture-of-experts layers yet; "
                "set flashrl.precision=bf16 for this model"
            )
        if isinstance(layer, MLAAttention) and self.precision is Precision.INT8:
            # It derives tensors from kv_b_proj after loading, at new addresses, which CUDA graphs would not see.
            raise ConfigError(
                f"{prefix}: flashrl.precision=int8 does not support multi-head latent attention; set flashrl.precision=bf16"
            )
        return None  # embeddings, lm_head and attention use vLLM's own unquantized method


def quantization_config_dict(precision: Precision) -> dict[str, str]:
    """What goes into the engine's ``hf_overrides["quantization_config"]``."""
    return {"quant_method": NAME, "precision": precision.value}
