# SPDX-License-Identifier: Apache-2.0
"""Which layers are quantized: an allow-list of exact types, and nothing by accident."""

import pytest
import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.config import FlashRLQuantizationConfig, quantization_config_dict
from flashrl_verl.quantization.head import Fp32HeadMethod
from flashrl_verl.quantization.linear import QuantizedLinearMethod
from flashrl_verl.quantization.selection import LayerSelection
from flashrl_verl.settings import FlashRLConfig, Precision


def layer(kind: type) -> torch.nn.Module:
    """An instance without its weights: the choice looks at the type only, and a full one needs a process group."""
    return kind.__new__(kind)


def method(kind: type, precision: Precision, prefix: str = "model.layers.0.x", **settings):
    return FlashRLQuantizationConfig(precision, **settings).get_quant_method(layer(kind), prefix)


QUANTIZED = ["ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"]
QUANTIZING = [Precision.INT8, Precision.FP8]


@pytest.mark.parametrize("precision", QUANTIZING)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_four_parallel_linears_are_quantized_and_only_when_asked(name, precision):
    chosen = method(getattr(linear, name), precision)
    assert isinstance(chosen, QuantizedLinearMethod) and chosen.format.name == precision.value
    assert isinstance(method(getattr(linear, name), Precision.BF16), linear.UnquantizedLinearMethod)


@pytest.mark.parametrize("precision", QUANTIZING)
def test_a_replicated_linear_and_an_unknown_subclass_stay_unquantized(precision):
    class Unknown(linear.ColumnParallelLinear):
        pass

    for kind in (linear.ReplicatedLinear, Unknown):
        assert isinstance(method(kind, precision), linear.UnquantizedLinearMethod)


@pytest.mark.parametrize("precision", QUANTIZING)
def test_embeddings_and_lm_head_use_vllms_own_method(precision):
    for kind in (VocabParallelEmbedding, ParallelLMHead):
        assert method(kind, precision) is None


@pytest.mark.parametrize("precision", [*QUANTIZING, Precision.BF16])
def test_with_fp32_lm_head_the_head_and_an_embedding_that_may_be_tied_to_it_get_the_fp32_method(precision):
    for kind in (VocabParallelEmbedding, ParallelLMHead):
        assert isinstance(method(kind, precision, fp32_lm_head=True), Fp32HeadMethod)


@pytest.mark.parametrize("precision", [*QUANTIZING, Precision.BF16])
def test_multi_head_latent_attention_is_refused_in_every_precision(precision):
    with pytest.raises(ConfigError, match="multi-head latent attention .*actor_rollout_ref.rollout.name=vllm"):
        method(MLAAttention, precision)


def test_the_config_survives_the_way_through_the_engine_arguments():
    register()
    kept = {"ignore": ("re:.*down_proj",), "keep_first_layers": 1, "keep_last_layers": 2}
    settings = FlashRLConfig(precision="fp8", fp32_lm_head=True, **kept)
    config = get_quantization_config("flashrl").from_config(quantization_config_dict(settings))
    assert config.precision is Precision.FP8 and config.get_name() == "flashrl" and config.fp32_lm_head
    assert config.selection == LayerSelection(ignore=("re:.*down_proj",), keep_first=1, keep_last=2)


@pytest.mark.parametrize("config", [{"precision": "int4"}, {"precision": "int8", "surplus": 1}, {"ignore": "a"}])
def test_a_config_of_another_kind_is_refused(config):
    register()
    with pytest.raises(ConfigError):
        get_quantization_config("flashrl").from_config({"quant_method": "flashrl", **config})


@pytest.mark.parametrize("precision", [*QUANTIZING, Precision.BF16])
@pytest.mark.parametrize(
    "kind, name",
    [
        (linear.RowParallelLinear, "model.layers.3.mlp.down_proj"),
        (linear.ReplicatedLinear, "model.layers.3.mlp.gate"),
        (ParallelLMHead, "lm_head"),
        (VocabParallelEmbedding, "model.embed_tokens"),
    ],
)
def test_an_entry_of_ignore_is_of_use_for_every_kind_of_layer_and_precision(kind, name, precision):
    """compressed-tensors' own lists name lm_head and routers; a BF16 baseline keeps the INT8 run's list."""
    config = FlashRLQuantizationConfig(precision, ignore=(name, "model.layers.99.mlp.gate"))
    config.get_quant_method(layer(kind), name)
    assert config.selection.unused() == ["model.layers.99.mlp.gate"]


def test_an_ignored_layer_keeps_its_dtype():
    kept = method(linear.RowParallelLinear, Precision.INT8, "model.layers.3.mlp.down_proj", ignore=("re:.*down_proj",))
    assert isinstance(kept, linear.UnquantizedLinearMethod)
    assert isinstance(
        method(linear.RowParallelLinear, Precision.INT8, "model.layers.3.self_attn.o_proj", ignore=("re:.*down_proj",)),
        QuantizedLinearMethod,
    )
