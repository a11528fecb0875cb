# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of rows, exactly: a numpy recomputation (``references.py``) shares no code with them."""

import numpy as np
import pytest
import torch
from references import block_of
from references import quantize as reference

from flashrl_verl.quantization.formats import FP8, INT8, INT8_UNROTATED
from flashrl_verl.quantization.numerics import WeightFormat, as_bytes, quantize_rows
from flashrl_verl.quantization.rows import quantize_rows_into

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNROTATED = [pytest.param(INT8_UNROTATED, id="int8_unrotated"), pytest.param(FP8, id="fp8")]
FORMATS = [pytest.param(INT8, id="int8"), *UNROTATED]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NEVER = {"int8": 0x80, "fp8": 0x7F}
"""A byte that no finite row becomes."""


def random_weight(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Shapes no tile divides, columns for four ranks with every block of a rotation, rows of very different sizes, rows
    of zeros and subnormals, and exact ties."""
    g = torch.Generator().manual_seed(seed)
    n, k = (int(torch.randint(8, high, (1,), generator=g)) for high in (70, 100))
    k = 4 * (k, max(16, k // 16 * 16), max(32, k // 32 * 32), 64 * (1 + k % 3))[seed % 4]
    decades = 4 if dtype is torch.float16 else 30
    weight = torch.randn(n, k, generator=g) * torch.logspace(-decades, decades, n).unsqueeze(1)
    # An absmax of 127 makes every half a tie; one of 448 does so of E4M3's subnormals and the values between.
    integers = torch.randint(-254, 255, (k,), generator=g) * 0.5
    subnormals = torch.randint(-16, 17, (k,), generator=g) * 2.0**-10
    integers[0], subnormals[0] = 127.0, 448.0
    for row, values in zip(torch.randperm(n, generator=g), (torch.zeros(k), integers, subnormals), strict=False):
        weight[row] = values
    return weight.to(dtype)


def assert_exact(
    weight: torch.Tensor, fmt: WeightFormat, first: int = 0, width: int | None = None, quantize=quantize_rows_into
) -> None:
    """Quantize columns of ``weight`` into the middle of storage that is full of a byte no code has."""
    n, width = len(weight), weight.shape[1] if width is None else width
    storage = torch.empty(n + 4, width + 6, dtype=fmt.dtype, device=weight.device)
    as_bytes(storage).fill_(NEVER[fmt.name])
    scales = torch.full((n, 1), float("nan"), device=weight.device)
    inside = storage[2:-2, 3:-3]
    quantize(weight, inside, scales, fmt, first)
    codes, expected = reference(weight, fmt.name, block_of(width) if fmt.rotated else 1)
    np.testing.assert_array_equal(scales.cpu().numpy(), expected)
    np.testing.assert_array_equal(inside.cpu().double().numpy(), codes[:, first : first + width])
    as_bytes(inside).fill_(NEVER[fmt.name])
    assert (as_bytes(storage) == NEVER[fmt.name]).all(), "something else was written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_and_scales_equal_a_recomputation_exactly(device, dtype, fmt):
    """Of whole rows, of a tensor-parallel rank's columns under the scale of the whole row, of any strides."""
    for seed in range(100):
        weight = random_weight(seed, dtype).to(device)
        cut = weight.shape[1] // 4
        assert_exact(weight, fmt)
        assert_exact(weight, fmt, seed % 4 * cut, cut)
        assert_exact(weight.t()[1:, ::2], fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_subnormals_neither_overflow_nor_divide_by_zero(fmt):
    assert_exact(torch.tensor([[60, 0], [190, 1], [2**16, -(2**16)]]) * 2.0**-149, fmt)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_show_in_the_scale_of_their_row_only(device, fmt, dtype):
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight[1, 0], weight[2, 7], weight[4, 32] = float("nan"), float("inf"), float("-inf")
    codes, scales = torch.zeros(6, 48, dtype=fmt.dtype, device=device), torch.zeros(6, 1, device=device)
    quantize_rows_into(weight.to(device), codes, scales, fmt)
    assert scales.isfinite().flatten().tolist() == [True, False, False, True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [896, 5120, 8192, 8193, 8208, 16384, 16416, 27648, 65536])
def test_rows_of_every_length_have_the_same_codes(columns, dtype, fmt):
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))
    assert_exact(weight.to("cuda", dtype), fmt)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", UNROTATED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_million_quotients_are_rounded_as_ieee_division_rounds_them(fmt, dtype):
    """The kernel divides by multiplication: many scales, and values beside exact ties, where one ulp changes a code."""
    g = torch.Generator(device="cuda").manual_seed(7)
    rows, columns = 2048, 8192
    scales = torch.exp2(torch.rand(rows, 1, generator=g, device="cuda") * 60 - 30)
    codes = torch.randint(-127, 127, (rows, columns), generator=g, device="cuda") + 0.5
    nudge = 1 + torch.randint(-4, 5, (rows, columns), generator=g, device="cuda") * 2.0**-23
    weight = (codes * scales * nudge).to(dtype)
    weight[:, 0] = (scales * fmt.code_max).squeeze(1).to(dtype)
    weight = weight.clamp(-weight[:, :1], weight[:, :1])
    weight = torch.where(weight.isfinite(), weight, 0)
    got, got_scales = torch.empty(weight.shape, dtype=fmt.dtype, device="cuda"), torch.empty(rows, 1, device="cuda")
    quantize_rows_into(weight, got, got_scales, fmt)
    expected, expected_scales = quantize_rows(weight.cpu(), fmt)
    assert torch.equal(got_scales.cpu(), expected_scales)
    assert torch.equal(as_bytes(got).cpu(), as_bytes(expected))
