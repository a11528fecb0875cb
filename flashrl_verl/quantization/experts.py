# SPDX-License-Identifier: Apache-2.0
"""vLLM methods for fused mixture-of-experts layers: W8A8 experts that are quantized on load, and BF16 ones for the CPU.

The router is a linear layer of its own (``ReplicatedLinear``) and stays as it is.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats import Kernel
from flashrl_verl.quantization.gemm import device_kernel, emulated_multiply, token_quantizer
from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.quantization.parameter import QuantizedExperts
from flashrl_verl.upstream import patches

_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Of the gate, by vLLM's name."""

ExpertMultiply = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, x [tokens, K]) -> [tokens, N]: one projection of one expert."""


def expert_loop(
    layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor, gate_up: ExpertMultiply, down: ExpertMultiply
) -> torch.Tensor:
    """A mixture-of-experts layer, expert by expert: for a CPU, where vLLM's fused kernels want weights packed for them.

    Args:
        layer: vLLM's ``RoutedExperts``: how tokens are routed.
        x: [tokens, hidden].
        router_logits: [tokens, experts].
        gate_up: first projection of an expert.
        down: second; its input is float32.

    Returns:
        [tokens, hidden] in x's dtype: sum over the chosen experts of router weight times down(act(gate_up(x))).
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts  # not in 0.24

    activation = _ACTIVATIONS.get(layer.activation.value)
    if activation is None:
        raise ConfigError(f"experts with the activation {layer.activation.value} have no CPU kernel; use hardware=cuda")
    if layer.apply_router_weight_on_input:
        raise ConfigError(
            "this model applies router weights to the experts' input, which hardware=cpu does not compute; use "
            "hardware=cuda"
        )
    weights, chosen = select_experts(
        hidden_states=x,
        router_logits=router_logits,
        use_grouped_topk=layer.use_grouped_topk,
        top_k=layer.top_k,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = gate_up(expert, x[tokens]).float().chunk(2, dim=-1)
        hidden = activation(gate) * up
        out.index_add_(0, tokens, down(expert, hidden).float() * weights[tokens, slots].unsqueeze(1))
    return out.to(x.dtype)


_OF_ACTIVATION = ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
"""What a model may set and vLLM's ``fused_experts`` ignores; not every vLLM has them."""


class QuantizedMoEMethod(FusedMoEMethodBase):
    """Experts with symmetric 8-bit weights, a scale per output channel, and dynamic 8-bit activations per token.

    Raises:
        ConfigError: the layer has something that no kernel here computes.
    """

    def __init__(self, fmt: WeightFormat, moe: FusedMoEConfig, prefix: str):
        super().__init__(moe)
        self.format = fmt
        self.emulated = device_kernel(fmt) is Kernel.EMULATED
        self._quantize = token_quantizer(fmt) if fmt.rotated and not self.emulated else None
        unsupported = {
            "biases": moe.has_bias,
            "no gated activation": not moe.is_act_and_mul,
            "parameters of their activation": any(getattr(moe, name, None) is not None for name in _OF_ACTIVATION),
            "expert parallelism": moe.moe_parallel_config.use_ep,
            "data parallelism": moe.moe_parallel_config.dp_size > 1,
        }
        for what, present in unsupported.items():
            if present:
                raise ConfigError(
                    f"{prefix}: flashrl.precision={fmt.name} does not support experts with {what}; add 're:.*experts' "
                    "to flashrl.ignore, or set flashrl.precision=bf16"
                )

    @property
    def is_monolithic(self) -> bool:
        return self.emulated

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        parallel = self.moe.moe_parallel_config
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            scales = torch.nn.Parameter(torch.ones(*shape[:2], 1, dtype=torch.float32), requires_grad=False)
            weight = QuantizedExperts(
                data=torch.zeros(shape, dtype=self.format.dtype),
                scales=scales,
                format=self.format,
                tp_rank=parallel.tp_rank,
                tp_size=parallel.tp_size,
            )
            layer.register_parameter(name, weight)
            layer.register_parameter(f"{name}_scale", scales)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make(
            self.format.dtype,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            per_act_token_quant=True,
            per_out_ch_quant=not self.format.rounds_to_integers,  # vLLM's own INT8 config says False and means the same
        )

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # The function and not vLLM's TritonExperts class, whose assertion on the activations' dtype leaves INT8 out
        # (0.24 to 0.27): there "INT8 experts" are weight-only.
        from vllm.model_executor.layers.fused_moe import fused_moe

        with contextlib.ExitStack() as patched:
            if self._quantize is not None:
                patched.enter_context(patches.quantizing_experts_inputs(fused_moe, self._quantize))
            return fused_moe.fused_experts(
                x,
                layer.w13_weight,
                layer.w2_weight,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                global_num_experts=layer.global_num_experts,
                quant_config=self.moe_quant_config,
            )

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def multiply(name: str) -> ExpertMultiply:
            weight = getattr(layer, name)
            return lambda e, rows: emulated_multiply(rows.float(), weight.data[e], weight.scales.data[e], self.format)

        return expert_loop(layer, x, router_logits, multiply("w13_weight"), multiply("w2_weight"))


class UnpackedMoEMethod(UnquantizedFusedMoEMethod):
    """BF16 experts for CPU: keeps the weights as loaded.

    vLLM's own method packs them for its kernels, after which no update can reach them.
    """

    @property
    def is_monolithic(self) -> bool:
        return True  # vLLM 0.30's own is not: its kernel gets tokens that are routed

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def multiply(name: str) -> ExpertMultiply:
            weight, bias = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_bias", None)
            return lambda e, rows: functional.linear(
                rows.to(weight.dtype), weight[e], None if bias is None else bias[e]
            )

        return expert_loop(layer, x, router_logits, multiply("w13"), multiply("w2"))
