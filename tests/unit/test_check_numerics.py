# SPDX-License-Identifier: Apache-2.0
"""The layer check passes on real vLLM layers and finds kernels that give NaN, wrong scales, or the weights of
before."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization import gemm, parameter
from flashrl_verl.quantization.linear import QuantizedLinearMethod
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import numerics
from flashrl_verl.tools.check.findings import Verdict

EIGHT_BITS = [Precision.INT8, Precision.FP8]


def look(precision: Precision):
    register()
    [finding] = numerics.check_layer(precision, "cpu", 0)
    assert finding.name == f"{precision.value} numerics"
    return finding


def kernel(precision: Precision) -> type:
    return gemm.OneDnnGemm if precision is Precision.INT8 else gemm.EmulatedGemm


@pytest.mark.parametrize("precision", list(Precision))
def test_a_sound_layer_is_ok_in_every_precision(precision):
    finding = look(precision)
    assert finding.verdict is Verdict.OK and "dB against float64" in finding.text


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_nan_of_a_kernel_is_refused(monkeypatch, precision):
    apply = kernel(precision).apply

    def poisoned(self, layer, x, bias):
        out = apply(self, layer, x, bias)
        out[-1, -1] = float("nan")
        return out

    monkeypatch.setattr(kernel(precision), "apply", poisoned)
    finding = look(precision)
    assert finding.verdict is Verdict.FAIL and "NaN" in finding.text and "flashrl.precision=bf16" in finding.remedy


@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize("fault", ["dropped", "added twice", "of other rows", "of before"])
def test_a_kernel_with_another_bias_is_found(monkeypatch, precision, fault):
    apply, first = kernel(precision).apply, {}

    def another(self, layer, x, bias):
        if bias is not None:
            before = first.setdefault(id(bias), bias.clone())
            bias = {"dropped": None, "added twice": 2 * bias, "of other rows": bias.roll(1), "of before": before}[fault]
        return apply(self, layer, x, bias)

    monkeypatch.setattr(kernel(precision), "apply", another)
    finding = look(precision)
    assert finding.verdict is Verdict.FAIL and "with a bias" in finding.text and "below" in finding.text


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_a_product_that_is_a_tenth_too_large_is_below_the_limit(monkeypatch, precision):
    apply = kernel(precision).apply
    monkeypatch.setattr(kernel(precision), "apply", lambda self, layer, x, bias: apply(self, layer, x, bias) * 1.1)
    finding = look(precision)
    assert finding.verdict is Verdict.FAIL and "below" in finding.text


def test_a_kernel_that_keeps_the_weights_of_before_is_named_so(monkeypatch):
    changed = gemm.OneDnnGemm.weights_changed

    def once(self, layer):
        if not hasattr(layer, "onednn_handle"):
            changed(self, layer)

    monkeypatch.setattr(gemm.OneDnnGemm, "weights_changed", once)
    finding = look(Precision.INT8)
    assert finding.verdict is Verdict.FAIL and "computes with the weights before" in finding.text


def test_a_layer_that_is_not_quantized_is_not_called_int8(monkeypatch):
    from flashrl_verl.quantization import config

    monkeypatch.setattr(config, "QUANTIZED_LAYERS", ())
    finding = look(Precision.INT8)
    assert finding.verdict is Verdict.FAIL and "not quantized" in finding.text


def test_storage_that_moves_while_it_is_loaded_is_refused(monkeypatch):
    process = QuantizedLinearMethod.process_weights_after_loading

    def moving(self, layer):
        layer.weight.data = layer.weight.data.clone()
        process(self, layer)

    monkeypatch.setattr(QuantizedLinearMethod, "process_weights_after_loading", moving)
    finding = look(Precision.INT8)
    assert finding.verdict is Verdict.FAIL and "moved" in finding.text


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_one_wrong_scale_of_a_row_is_found(monkeypatch, precision):
    """Codes that belong to another scale: what a race in a fused loader would leave."""
    quantize = parameter.quantize_rows_into

    def one_wrong(weight, codes, scales, *rest):
        quantize(weight, codes, scales, *rest)
        scales[7] *= 3

    monkeypatch.setattr(parameter, "quantize_rows_into", one_wrong)
    assert look(precision).verdict is Verdict.FAIL


def test_a_kernel_that_reads_the_scales_of_other_rows_is_found(monkeypatch):
    apply = gemm.EmulatedGemm.apply

    def elsewhere(self, layer, x, bias):
        return apply(
            self, SimpleNamespace(weight=layer.weight, weight_scale=layer.weight_scale.data.roll(1, 0)), x, bias
        )

    monkeypatch.setattr(gemm.EmulatedGemm, "apply", elsewhere)
    assert look(Precision.FP8).verdict is Verdict.FAIL


@pytest.mark.parametrize("count", [1, 257])
@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_a_kernel_that_is_wrong_for_one_number_of_tokens_is_found(monkeypatch, precision, count):
    apply = kernel(precision).apply

    def wrong_once(self, layer, x, bias):
        out = apply(self, layer, x, bias)
        return torch.zeros_like(out) if len(x) == count else out

    monkeypatch.setattr(kernel(precision), "apply", wrong_once)
    finding = look(precision)
    assert finding.verdict is Verdict.FAIL and f"for {count} token(s)" in finding.text
