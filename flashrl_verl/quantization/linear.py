# SPDX-License-Identifier: Apache-2.0
"""vLLM linear methods: W8A8 that is quantized on load, and a BF16 one whose weight can be updated on CPU."""

import torch
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)

from flashrl_verl.config import Precision
from flashrl_verl.quantization.gemm import linear_gemm
from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.quantization.parameter import QuantizedWeight
from flashrl_verl.quantization.whole_blocks import require_whole_blocks


def _row_ranks(layer: torch.nn.Module, ranks: int, parts: int) -> list[int]:
    """Ranks among which the rows of each projection are cut; vLLM's ``output_size`` counts a KV head for each that has it."""
    shared = ranks // getattr(layer, "num_kv_head_replicas", 1)  # of a QKVParallelLinear
    return [ranks] + [shared] * (parts - 1)


@register_weight_loader_v2_supported_method
class QuantizedLinearMethod(LinearMethodBase):
    """Symmetric 8-bit weights with a scale per output channel or block, and dynamic 8-bit activations per token.

    Args:
        fmt: format of the codes.
        prefix: vLLM's name of the layer.
    """

    def __init__(self, fmt: WeightFormat, prefix: str):
        self.format, self._prefix = fmt, prefix
        self.gemm = linear_gemm(fmt)

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
        require_whole_blocks(
            Precision(self.format.name), self._prefix, output_partition_sizes, input_size_per_partition,
            row_ranks=_row_ranks(layer, output_size // shape[0], len(output_partition_sizes)),
            column_ranks=input_size // shape[1],
        )  # fmt: skip
        # A plain Parameter without a loader: no checkpoint tensor is ever copied into it, only `QuantizedWeight` writes it.
        scales = torch.nn.Parameter(torch.ones(self.format.scale_shape(*shape), dtype=torch.float32), requires_grad=False)
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

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.gemm.weights_changed(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.gemm.apply(layer, x, bias)


@register_weight_loader_v2_supported_method
class UnpackedLinearMethod(UnquantizedLinearMethod):
    """BF16 for CPU: keeps ``layer.weight`` as loaded.

    vLLM's own method prepacks the weight there and drops the parameter, after which no update can reach it.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)
