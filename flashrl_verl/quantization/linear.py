# SPDX-License-Identifier: Apache-2.0
"""vLLM linear methods: W8A8 that is quantized on load, a BF16 one whose weight can be updated on CPU, and a head in
FP32."""

import torch
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from flashrl_verl.fp32_head import fp32_logits
from flashrl_verl.quantization.gemm import linear_kernel
from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.quantization.parameter import QuantizedWeight


@register_weight_loader_v2_supported_method
class QuantizedLinearMethod(LinearMethodBase):
    """Symmetric 8-bit weights with a scale per output channel, and dynamic 8-bit activations per token.

    Args:
        fmt: format of the codes.
    """

    def __init__(self, fmt: WeightFormat):
        self.format = fmt
        self.multiply = linear_kernel(fmt)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        shape = sum(output_partition_sizes), input_size_per_partition
        # A plain Parameter without a loader: no checkpoint tensor is ever copied into it, only `QuantizedWeight` writes
        # it.
        scales = torch.nn.Parameter(torch.ones(shape[0], 1, dtype=torch.float32), requires_grad=False)
        weight = QuantizedWeight(
            data=torch.zeros(shape, dtype=self.format.dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
            scales=scales,
            format=self.format,
        )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scales)
        layer.flashrl_dtype = params_dtype

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.multiply(x, layer.weight, layer.weight_scale, bias)


@register_weight_loader_v2_supported_method
class UnpackedLinearMethod(UnquantizedLinearMethod):
    """BF16 for CPU: keeps ``layer.weight`` as loaded.

    vLLM's own method prepacks the weight there and drops the parameter, after which no update can reach it.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class Fp32HeadMethod(UnquantizedEmbeddingMethod):
    """``flashrl.fp32_lm_head``: vLLM's unquantized method but for ``apply``, which only the logits use.

    ``weight`` keeps the model's dtype and its loader, so a refit, tied embeddings and sleep mode find what they know,
    and what ``apply`` reads is that parameter alone. Under tensor parallelism each rank multiplies its part of the
    vocabulary and vLLM gathers FP32 logits. vLLM 0.27 has ``hf_overrides["head_dtype"]`` for the same product; 0.24
    knows it for pooling models only, and this way serves both.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass  # on a CPU vLLM packs a copy here, for the product that `apply` replaces

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fp32_logits(x, layer.weight, bias)
