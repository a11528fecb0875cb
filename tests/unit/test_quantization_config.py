# SPDX-License-Identifier: Apache-2.0
"""Which layers are quantized, by an allow-list of exact types, and with which kernel."""

import pytest
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.config import FlashRLQuantizationConfig, quantization_config_dict
from flashrl_verl.quantization.formats import FP8, INT8, INT8_UNROTATED, Kernel
from flashrl_verl.quantization.gemm import choose_kernel
from flashrl_verl.quantization.linear import Fp32HeadMethod, QuantizedLinearMethod
from flashrl_verl.quantization.selection import LayerSelection
from flashrl_verl.settings import FlashRLConfig, Precision

LINEARS = [
    linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear, linear.RowParallelLinear,
]  # fmt: skip
HEADS = [VocabParallelEmbedding, ParallelLMHead]
IGNORE = ("re:.*down_proj",)


class Unknown(linear.ColumnParallelLinear):
    """Its loader may be another."""


def method(kind: type, precision: Precision, prefix: str = "model.layers.3.x", **settings):
    """Of an instance without its weights: the choice looks at the type only, and a full one needs a process group."""
    config = FlashRLQuantizationConfig(FlashRLConfig(precision=precision, **settings))
    return config.get_quant_method(kind.__new__(kind), prefix)


@pytest.mark.parametrize("precision", list(Precision))
def test_the_four_parallel_linears_are_quantized_and_nothing_else(precision):
    for kind in LINEARS:
        chosen = method(kind, precision)
        if precision is Precision.BF16:
            assert isinstance(chosen, linear.UnquantizedLinearMethod)
        else:
            assert isinstance(chosen, QuantizedLinearMethod) and chosen.format.name == precision.value
        kept = method(kind, precision, "model.layers.3.mlp.down_proj", ignore=IGNORE)
        assert isinstance(kept, linear.UnquantizedLinearMethod)
    for kind in (linear.ReplicatedLinear, Unknown):
        assert isinstance(method(kind, precision), linear.UnquantizedLinearMethod)
    for kind in HEADS:  # an embedding may be the head's weight
        assert method(kind, precision) is None
        assert isinstance(method(kind, precision, fp32_lm_head=True), Fp32HeadMethod)
    with pytest.raises(ConfigError, match="multi-head latent attention .*actor_rollout_ref.rollout.name=vllm"):
        method(MLAAttention, precision)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("kind", [linear.RowParallelLinear, linear.ReplicatedLinear, *HEADS])
def test_an_entry_of_ignore_is_of_use_for_every_kind_of_layer_and_precision(kind, precision):
    """compressed-tensors' own lists name lm_head and routers; a BF16 baseline keeps the INT8 run's list."""
    settings = FlashRLConfig(precision=precision, ignore=("model.layers.3.x", "model.layers.99.mlp.gate"))
    config = FlashRLQuantizationConfig(settings)
    config.get_quant_method(kind.__new__(kind), "model.layers.3.x")
    assert config.selection.unused() == ["model.layers.99.mlp.gate"]


def test_the_config_survives_the_way_through_the_engine_arguments():
    register()
    settings = FlashRLConfig(fp32_lm_head=True, ignore=IGNORE, rotation=False)
    config = get_quantization_config("flashrl").from_config(quantization_config_dict(settings))
    assert config.precision is Precision.INT8 and config.format is INT8_UNROTATED and config.fp32_lm_head
    assert config.selection == LayerSelection(ignore=IGNORE)


@pytest.mark.parametrize(
    "fmt, device, capability, expected",
    [
        *((INT8, "cuda", capability, Kernel.CUTLASS) for capability in (80, 90)),
        *((INT8, "cuda", capability, Kernel.TRITON) for capability in (100, 120)),
        (INT8, "cpu", 0, Kernel.EMULATED),
        *((FP8, "cuda", capability, Kernel.CUTLASS) for capability in (89, 90, 120)),
        (FP8, "cpu", 0, Kernel.EMULATED),
        *((FP8, "cuda", capability, "int8") for capability in (80, 86)),
        (FP8, "cuda", 75, "bf16"),
        (INT8, "cuda", 75, "bf16"),
    ],
)
def test_a_gpu_gets_a_kernel_that_it_has_or_is_told_another_precision(fmt, device, capability, expected):
    if isinstance(expected, Kernel):
        assert choose_kernel(fmt, device, capability) is expected
    else:
        said = f"flashrl.precision={fmt.name} .*capability {capability / 10}.* Set flashrl.precision={expected}"
        with pytest.raises(ConfigError, match=said):
            choose_kernel(fmt, device, capability)


def test_layers_that_compute_something_else_are_another_compiled_model_to_vllm(tmp_path, monkeypatch):
    from tiny_models import CONFIGS
    from vllm.engine.arg_utils import EngineArgs

    from flashrl_verl.quantization import config

    CONFIGS["qwen2.5"].save_pretrained(tmp_path)
    hashes = set()
    for number in (1, 2):
        monkeypatch.setattr(config, "GRAPH", (config.GRAPH[0], number))
        arguments = config.engine_arguments(FlashRLConfig())
        hashes.add(
            EngineArgs(str(tmp_path), skip_tokenizer_init=True, **arguments).create_model_config().compute_hash()
        )
    assert len(hashes) == 2
