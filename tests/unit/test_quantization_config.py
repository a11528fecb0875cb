# SPDX-License-Identifier: Apache-2.0
"""Which layers become INT8: an allow-list of exact types, and nothing by accident."""

import pytest
import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.plugin_vllm import register
from flashrl_verl.quantization.config import FlashRLQuantizationConfig, quantization_config_dict
from flashrl_verl.quantization.linear import Int8LinearMethod


def layer(kind: type) -> torch.nn.Module:
    """An instance without its weights: the choice looks at the type only, and a full one needs a process group."""
    return kind.__new__(kind)


def method(kind: type, precision: Precision):
    return FlashRLQuantizationConfig(precision).get_quant_method(layer(kind), "model.layers.0.x")


QUANTIZED = ["ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_four_parallel_linears_are_int8_and_only_when_asked(name):
    assert isinstance(method(getattr(linear, name), Precision.INT8), Int8LinearMethod)
    assert isinstance(method(getattr(linear, name), Precision.BF16), linear.UnquantizedLinearMethod)


def test_a_replicated_linear_and_an_unknown_subclass_stay_unquantized():
    class Unknown(linear.ColumnParallelLinear):
        pass

    for kind in (linear.ReplicatedLinear, Unknown):
        assert isinstance(method(kind, Precision.INT8), linear.UnquantizedLinearMethod)


def test_embeddings_and_lm_head_use_vllms_own_method():
    for kind in (VocabParallelEmbedding, ParallelLMHead):
        assert method(kind, Precision.INT8) is None


@pytest.mark.parametrize("kind", [RoutedExperts, MLAAttention])
def test_what_cannot_be_int8_is_refused_rather_than_left_in_bf16_unsaid(kind):
    with pytest.raises(ConfigError, match="set flashrl.precision=bf16"):
        method(kind, Precision.INT8)
    assert method(kind, Precision.BF16) is None


def test_the_config_survives_the_way_through_the_engine_arguments():
    register()
    register()  # idempotent
    config = get_quantization_config("flashrl").from_config(quantization_config_dict(Precision.INT8))
    assert config.precision is Precision.INT8 and config.get_name() == "flashrl"


@pytest.mark.parametrize("content", [{}, {"precision": "int3"}, {"quant_method": "flashrl"}])
def test_a_config_without_a_known_precision_is_refused(content):
    with pytest.raises(ConfigError, match="flashrl.precision"):
        FlashRLQuantizationConfig.from_config(content)


def test_there_is_no_default_precision_to_fall_back_to():
    with pytest.raises(TypeError):
        FlashRLQuantizationConfig()
