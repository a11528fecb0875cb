# SPDX-License-Identifier: Apache-2.0
"""Bounds of queries, keys and values, and the scales made of them, against float64 by hand."""

import math

import pytest
import torch

from flashrl_verl.config import Precision
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import dequantize, quantize, quantize_rows
from flashrl_verl.quantization.parameter import QuantizedWeight
from flashrl_verl.quantization.row_norms import row_norms
from flashrl_verl.rollout.kv_scales import power_of_two_scales

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def linear(weight: torch.Tensor, precision: str) -> torch.nn.Module:
    """A layer that holds a weight as the engine does."""
    layer, fmt = torch.nn.Module(), weight_format(Precision(precision))
    if fmt is None:
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        return layer
    codes, scales = quantize(weight, fmt)
    # Without its constructor, which asks vLLM for the process group.
    layer.weight = QuantizedWeight.__new__(QuantizedWeight, data=codes)
    layer.weight._set_up(torch.nn.Parameter(scales, requires_grad=False), fmt)
    return layer


def dequantized(layer: torch.nn.Module) -> torch.Tensor:
    if isinstance(layer.weight, QuantizedWeight):
        return dequantize(layer.weight.data, layer.weight.scales.data).double()
    return layer.weight.data.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8", "fp8_block"])
def test_row_norms_are_those_of_float64(precision, device):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        n, k = (int(torch.randint(1, 3000, (), generator=g)) for _ in range(2))
        if precision == "fp8_block":
            n, k = (-(-size // 128) * 128 for size in (n, k))
        weight = (torch.randn(n, k, generator=g) * torch.rand(n, 1, generator=g).mul(4).exp()).bfloat16()
        gains = torch.randn(k, generator=g).bfloat16()
        layer = linear(weight.to(device), precision)
        expected = (dequantized(layer).cpu() * gains.double()).square().sum(1).sqrt()
        torch.testing.assert_close(row_norms(layer, gains.to(device)).cpu().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_a_row_that_is_not_finite_shows(precision, device):
    weight = torch.ones(3, 40, device=device).bfloat16()
    layer = linear(weight, precision)
    target = layer.weight.scales.data if precision != "bf16" else layer.weight.data
    target[1, 0] = float("nan")
    assert row_norms(layer, torch.ones(40, device=device)).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("d, outlier", [(5120, 1.0), (8192, 1.0), (512, 762.0)])
def test_an_input_rounded_to_8_bits_is_at_most_twice_the_exact_one(d, outlier):
    """Rounding can lengthen it past sqrt(d), for which the bound of a quantized projection is doubled."""
    for seed, precision in enumerate(("int8", "fp8")):
        g, fmt = torch.Generator().manual_seed(seed), weight_format(Precision(precision))
        normalized = torch.randn(64, d, generator=g)
        normalized *= math.sqrt(d) / normalized.norm(dim=1, keepdim=True)
        gains = torch.ones(d)
        gains[0] = outlier
        x = normalized * gains
        rounded = dequantize(*quantize_rows(x, fmt))
        assert (rounded.abs() <= 2 * x.abs()).all()
        assert (rounded.norm(dim=1) > x.norm(dim=1)).any(), "not merely by luck within the exact bound"


def test_no_input_of_the_norm_that_precedes_it_exceeds_the_bound_and_one_reaches_it():
    """The input that is parallel to a row is the worst one."""
    g = torch.Generator().manual_seed(7)
    weight, gains = torch.randn(64, 96, generator=g), torch.randn(96, generator=g)
    bound = row_norms(linear(weight, "bf16"), gains).double() * math.sqrt(96)

    def outputs(x: torch.Tensor) -> torch.Tensor:  # RMSNorm, its gains, the projection
        normalized = x / x.square().mean(-1, keepdim=True).sqrt()
        return ((normalized * gains.double()) @ weight.double().T).abs()

    assert (outputs(torch.randn(1000, 96, generator=g).double()) <= bound).all()
    worst = outputs((weight * gains).double()).diagonal()
    torch.testing.assert_close(worst, bound, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_is_the_least_power_of_two_that_makes_a_bound_fit(device):
    g = torch.Generator().manual_seed(3)
    bounds = torch.randn(5000, generator=g).mul(12).exp()
    bounds = torch.cat([bounds, 448 * torch.tensor([2.0**i for i in range(-20, 20)])])
    scales = power_of_two_scales(bounds.to(device)).cpu().double()
    assert (scales.log2() == scales.log2().round()).all()
    ratio = bounds.double() / scales
    assert (ratio <= 448).all() and (ratio > 224).all()


def test_a_bound_of_zero_or_not_finite():
    found = power_of_two_scales(torch.tensor([0.0, float("inf"), float("nan"), 448.0]))
    assert found[0] == 1 and found[1:3].isnan().all() and found[3] == 1
