# SPDX-License-Identifier: Apache-2.0
"""The experts' check passes on vLLM's experts as the rollout loads them, and finds what a kernel or a loader does
wrong."""

import pytest
import torch

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization import config
from flashrl_verl.quantization.experts import QuantizedMoEMethod
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import experts
from flashrl_verl.tools.check.findings import Verdict

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the loop over experts is for CPUs")

EIGHT_BITS = [Precision.INT8, Precision.FP8]


def look(precision: Precision):
    register()
    [finding] = experts.check_experts(precision, "cpu", 0)
    assert finding.name == f"{precision.value} experts"
    return finding


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_sound_experts_are_ok(precision):
    finding = look(precision)
    assert finding.verdict is Verdict.OK and "dB against float64" in finding.text


OUTPUTS = {
    "NaN": (lambda out: out.index_fill(0, torch.tensor([0]), float("nan")), "NaN"),
    "a tenth too large": (lambda out: out * 1.1, "below"),
    "of other tokens": (lambda out: out.roll(1, 0) if len(out) > 1 else out, "below"),
    "of other channels": (lambda out: out.roll(1, 1), "below"),
}


@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize("fault", OUTPUTS)
def test_a_kernel_with_another_output_is_found(monkeypatch, fault, precision):
    apply, (change, said) = QuantizedMoEMethod.apply_monolithic, OUTPUTS[fault]
    monkeypatch.setattr(
        QuantizedMoEMethod, "apply_monolithic", lambda self, *arguments: change(apply(self, *arguments))
    )
    finding = look(precision)
    assert finding.verdict is Verdict.FAIL and said in finding.text and "flashrl.precision=bf16" in finding.remedy


STORED = {
    "scales of another expert": lambda layer: layer.w2_weight.scales.data.copy_(layer.w2_weight.scales.data.roll(1, 0)),
    "one expert's codes": lambda layer: layer.w13_weight.data[3].copy_(layer.w13_weight.data[2]),
    "gate and up exchanged": lambda layer: layer.w13_weight.data.copy_(layer.w13_weight.data.roll(128, 1)),
    "one scale": lambda layer: layer.w2_weight.scales.data[4, 0].mul_(4),
}


@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize("fault", STORED)
def test_what_is_stored_for_another_expert_or_projection_is_found(monkeypatch, fault, precision):
    process = QuantizedMoEMethod.process_weights_after_loading

    def wrong(self, layer):
        STORED[fault](layer)
        process(self, layer)

    monkeypatch.setattr(QuantizedMoEMethod, "process_weights_after_loading", wrong)
    assert look(precision).verdict is Verdict.FAIL


def test_experts_that_keep_the_packed_weights_of_before_are_found(monkeypatch):
    process = QuantizedMoEMethod.process_weights_after_loading

    def once(self, layer):
        if not hasattr(layer, "w2_weight_handles"):
            process(self, layer)

    monkeypatch.setattr(QuantizedMoEMethod, "process_weights_after_loading", once)
    assert look(Precision.INT8).verdict is Verdict.FAIL


def test_experts_that_are_not_quantized_are_not_called_int8(monkeypatch):
    monkeypatch.setattr(config.FlashRLQuantizationConfig, "quantizes", lambda self, layer, prefix: False)
    finding = look(Precision.INT8)
    assert finding.verdict is Verdict.FAIL and "not quantized" in finding.text


def test_what_refuses_experts_is_a_warning_with_its_remedy(monkeypatch):
    def refuse(self, *arguments, **more):
        raise ConfigError("experts with biases are not supported. Set flashrl.precision=bf16")

    monkeypatch.setattr(QuantizedMoEMethod, "__init__", refuse)
    finding = look(Precision.INT8)
    assert finding.verdict is Verdict.WARN and finding.remedy == "set flashrl.precision=bf16"
    assert "models with experts are refused here" in finding.text
