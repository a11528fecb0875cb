# SPDX-License-Identifier: Apache-2.0
"""A vLLM model of one layer with experts, without an engine, for the quantization config ``flashrl``."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from benchmarks import models
from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.config import engine_arguments
from flashrl_verl.settings import FlashRLConfig, Precision

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 256, 128


@contextlib.contextmanager
def model(precision: Precision) -> Iterator[torch.nn.Module]:
    """Small, with dummy weights."""
    register()
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=128, num_hidden_layers=1, hidden_size=HIDDEN,
        intermediate_size=256, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, num_attention_heads=6, num_key_value_heads=2, head_dim=64, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        with models.model(Path(folder), **engine_arguments(FlashRLConfig(precision=precision))) as (built, _):
            yield built


def linear(built: torch.nn.Module) -> torch.nn.Module:
    return built.model.layers[0].self_attn.o_proj


def experts(built: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in built.modules() if isinstance(module, RoutedExperts))


def load_experts(built: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Load weights [E, N, K] (w13: gate over up) by their names in a checkpoint, and finish as vLLM does."""
    parts = {"gate_proj": w13[:, :INTERMEDIATE], "up_proj": w13[:, INTERMEDIATE:], "down_proj": w2}
    layer = experts(built)
    with torch.no_grad():
        built.load_weights(
            (f"model.layers.0.mlp.experts.{e}.{part}.weight", weight.to(layer.w2_weight.device))
            for part, stacked in parts.items()
            for e, weight in enumerate(stacked)
        )
        layer.quant_method.process_weights_after_loading(layer)


def run_experts(layer: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the engine calls, behind vLLM's choice of experts: [tokens, hidden] bfloat16 from x alike and logits of the
    router [tokens, experts]."""
    method, place = layer.quant_method, layer.w13_weight.device
    x, logits = x.to(place), logits.to(place)
    with torch.no_grad():
        if method.is_monolithic:
            return method.apply_monolithic(layer, x, logits)
        method.moe_quant_config = method.get_fused_moe_quant_config(layer)
        shares, chosen = logits.softmax(-1).topk(TOP_K)
        return method.apply(layer, x, shares / shares.sum(-1, keepdim=True), chosen.int())
