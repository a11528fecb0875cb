# SPDX-License-Identifier: Apache-2.0
"""The self-check: whatever is not the same after it is named, and so is a layer that computes with a copy."""

import dataclasses
import math
from types import SimpleNamespace

import one_layer
import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quantization.linear import QuantizedLinearMethod
from flashrl_verl.refit.self_check import EngineState, require_same
from flashrl_verl.rollout.worker import layers_with_stale_copies
from flashrl_verl.settings import Precision

ONE = {"a.weight": (11, 0x1000), "a.scale": (12, 0x2000)}
STATE = EngineState(workers=[ONE, {"a.weight": (21, 0x3000)}], token_ids=[4, 5, 6], log_probs=[-0.5, -1.0, -0.25])
CHANGES = [
    ({"workers": [ONE, {"a.weight": (22, 0x3000)}]}, "worker 1: with other contents: a.weight"),
    ({"workers": [{**ONE, "a.scale": (12, 0x2010)}, STATE.workers[1]]}, "worker 0: moved: a.scale"),
    ({"workers": [{"a.weight": ONE["a.weight"]}, STATE.workers[1]]}, "worker 0: there only once: a.scale"),
    ({"token_ids": [4, 5, 7]}, "greedy tokens [4, 5, 7] instead of [4, 5, 6]"),
    ({"log_probs": [-0.5, -1.01, -0.25]}, "log-probs of the same greedy tokens differ by up to 0.01"),
    ({"log_probs": [-0.5, math.nan, -0.25]}, "log-probs of the same greedy tokens"),
]


@pytest.mark.parametrize("change, words", CHANGES)
def test_whatever_changed_is_named_with_its_replica(change, words):
    require_same([STATE], [dataclasses.replace(STATE, log_probs=[-0.5, -1.0004, -0.25])], "rounding")
    with pytest.raises(FlashRLError) as caught:
        require_same([STATE, STATE], [STATE, dataclasses.replace(STATE, **change)], "sleep at level 1")
    message = str(caught.value)
    assert "after sleep at level 1" in message and f"replica 1: {words}" in message and "replica 0" not in message


def stale(precision: Precision) -> list[str]:
    """What is said of a model of one linear layer and a head."""
    with one_layer.model(precision) as built:
        head = ParallelLMHead(128, 64, params_dtype=torch.bfloat16)
        model = torch.nn.ModuleDict({"o_proj": one_layer.linear(built), "lm_head": head})

        def process_weights():
            for module in model.values():
                module.quant_method.process_weights_after_loading(module)

        return layers_with_stale_copies(model, process_weights)


@pytest.mark.parametrize("precision", list(Precision))
def test_sound_layers_are_not_named(precision):
    assert stale(precision) == []


def test_a_short_convolution_in_a_linear_layers_class_is_no_product():
    with one_layer.model(Precision.INT8) as built:
        convolution = ColumnParallelLinear(4, 64, bias=False, params_dtype=torch.bfloat16)
        convolution.weight.data = convolution.weight.data.unsqueeze(1)  # as vLLM's Qwen3-Next has it
        model = torch.nn.ModuleDict({"conv1d": convolution, "o_proj": one_layer.linear(built)})
        assert layers_with_stale_copies(model, lambda: None) == []


@pytest.mark.parametrize("copied", [("weight",), ("weight_scale",), ("weight", "weight_scale")], ids="+".join)
def test_a_layer_that_computes_with_a_copy_is_named_whatever_it_copied(monkeypatch, copied):
    apply, copies = QuantizedLinearMethod.apply, {}

    def with_copies(self, layer, x, bias=None):
        now = {name: getattr(layer, name).data for name in ("weight", "weight_scale")}
        for name in copied:
            now[name] = copies.setdefault(name, now[name].clone())
        return apply(self, SimpleNamespace(**now), x, bias)

    monkeypatch.setattr(QuantizedLinearMethod, "apply", with_copies)
    assert stale(Precision.FP8) == ["o_proj"]


def test_a_packed_copy_that_is_not_made_again_is_named(monkeypatch):
    def once(self, layer):
        if not hasattr(layer, "packed"):
            layer.packed = layer.weight.data.clone()

    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", once)
    monkeypatch.setattr(
        UnquantizedEmbeddingMethod, "apply", lambda self, layer, x, bias=None: functional.linear(x, layer.packed, bias)
    )
    assert stale(Precision.INT8) == ["lm_head"]
