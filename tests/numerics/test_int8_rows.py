# SPDX-License-Identifier: Apache-2.0
"""The row-wise INT8 arithmetic against a float64 / numpy float32 recomputation that shares no code with it."""

import numpy as np
import pytest
import torch

from flashrl_verl.quantization.kernels import quantize_rows_into
from flashrl_verl.quantization.numerics import dequantize_rows, quantize_rows, row_scales, sqnr_db

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """numpy float32, element by element: IEEE division, numpy's rint is round-half-even."""
    w = weight.float().cpu().numpy()
    scales = np.empty((w.shape[0], 1), dtype=np.float32)
    for n, row in enumerate(w):
        absmax = np.float32(max(abs(float(x)) for x in row))
        scales[n] = absmax / np.float32(127)
        if scales[n] == 0:
            scales[n] = 1
    codes = np.clip(np.rint(w / scales), -127, 127).astype(np.int8)
    return codes, scales


def random_weight(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Shapes no tile divides, rows of very different sizes, zero rows and exact ties."""
    g = torch.Generator().manual_seed(seed)
    n, k = (int(torch.randint(1, high, (1,), generator=g)) for high in (70, 400))
    weight = torch.randn(n, k, generator=g) * torch.logspace(-6, 3, n).unsqueeze(1)
    weight[int(torch.randint(n, (1,), generator=g))] = 0
    ties = torch.randint(-254, 255, (k,), generator=g) * 0.5  # absmax 127 would make every half a tie
    ties[0] = 127.0
    weight[int(torch.randint(n, (1,), generator=g))] = ties
    return weight.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_equal_a_recomputation_exactly(device, dtype):
    for seed in range(40):
        weight = random_weight(seed, dtype)
        codes = torch.full(weight.shape, -128, dtype=torch.int8, device=device)
        scales = torch.full((weight.shape[0], 1), float("nan"), device=device)
        quantize_rows_into(weight.to(device), codes, scales)
        expected_codes, expected_scales = reference(weight)
        np.testing.assert_array_equal(scales.cpu().numpy(), expected_scales)
        np.testing.assert_array_equal(codes.cpu().numpy(), expected_codes)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_parallel_shard_has_the_codes_and_scales_of_the_whole_row(device):
    for seed in range(20):
        weight = random_weight(seed, torch.bfloat16)
        if weight.shape[1] < 8:
            continue
        whole, scales = quantize_rows(weight)
        cut = weight.shape[1] // 4
        for first, width in ((0, cut), (cut, cut), (weight.shape[1] - cut, cut)):
            codes = torch.zeros(weight.shape[0], width, dtype=torch.int8, device=device)
            shard_scales = torch.zeros(weight.shape[0], 1, device=device)
            quantize_rows_into(weight.to(device), codes, shard_scales, column_offset=first)
            assert torch.equal(codes.cpu(), whole[:, first : first + width])
            assert torch.equal(shard_scales.cpu(), scales)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32768, 32769, 65536])
def test_rows_longer_than_one_block_have_the_same_codes(columns):
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    codes = torch.zeros(5, columns, dtype=torch.int8, device="cuda")
    scales = torch.zeros(5, 1, device="cuda")
    quantize_rows_into(weight.cuda(), codes, scales)
    expected_codes, expected_scales = quantize_rows(weight)
    assert torch.equal(codes.cpu(), expected_codes) and torch.equal(scales.cpu(), expected_scales)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_sources_and_destinations_are_honoured(device):
    g = torch.Generator().manual_seed(3)
    big = torch.randn(40, 90, generator=g).bfloat16().to(device)
    weight = big.t()[3:50, ::2]  # neither stride is one
    storage = torch.zeros(60, 30, dtype=torch.int8, device=device)
    codes = storage[5:52, 4:24]
    scales = torch.zeros(47, 1, device=device)
    quantize_rows_into(weight, codes, scales)
    expected_codes, expected_scales = reference(weight)
    np.testing.assert_array_equal(codes.cpu().numpy(), expected_codes)
    np.testing.assert_array_equal(scales.cpu().numpy(), expected_scales)
    assert not storage[:5].any() and not storage[:, :4].any() and not storage[:, 24:].any()


def test_the_error_is_at_most_half_a_scale():
    weight = random_weight(11, torch.float32)
    codes, scales = quantize_rows(weight)
    error = (weight.double() - dequantize_rows(codes, scales).double()).abs()
    assert (error <= scales.double() * 0.5 * (1 + 1e-6)).all()


def test_codes_are_symmetric_and_never_minus_128():
    for seed in range(10):
        weight = random_weight(seed, torch.bfloat16)
        codes, _ = quantize_rows(weight)
        assert torch.equal(quantize_rows(-weight)[0], -codes)
        assert codes.min() >= -127


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_show_in_the_scale_of_their_row_only(device, bad):
    weight = torch.randn(6, 33, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight[2, 7] = bad
    codes = torch.zeros(6, 33, dtype=torch.int8, device=device)
    scales = torch.zeros(6, 1, device=device)
    quantize_rows_into(weight.to(device), codes, scales)
    assert [bool(x) for x in scales.isfinite().flatten()] == [True, True, False, True, True, True]


def test_subnormal_rows_neither_overflow_nor_divide_by_zero():
    tiny = torch.tensor([[1e-45 * 60, 0.0], [1.4e-45 * 190, 1.4e-45], [9.2e-41, -9.2e-41]], dtype=torch.float32)
    codes, scales = quantize_rows(tiny)
    assert scales.isfinite().all() and (scales > 0).all()
    assert codes.abs().max() <= 127


def test_compressed_tensors_gives_the_same_codes_for_our_scales():
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = QuantizationArgs(
        num_bits=8, type=QuantizationType.INT, strategy=QuantizationStrategy.CHANNEL, symmetric=True, dynamic=False
    )
    for seed in range(20):
        weight = random_weight(seed, torch.float32)
        codes, scales = quantize_rows(weight)
        theirs = quantize(weight, scales, torch.zeros_like(scales, dtype=torch.int8), args, dtype=torch.int8)
        assert torch.equal(theirs, codes)


def test_sqnr_of_gaussian_rows_is_that_of_int8():
    """A Gaussian row of 4096 has absmax near 3.9 sigma: 10 log10(12 / (3.9 / 127)^2) is about 41 dB."""
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_rows(weight)
    assert 39.0 < sqnr_db(weight, dequantize_rows(codes, scales)) < 43.0


def test_row_scales_rejects_nothing_but_shows_zero_rows_as_one():
    assert row_scales(torch.zeros(2, 3)).tolist() == [[1.0], [1.0]]


def test_integer_sources_and_misfitting_shapes_are_refused():
    codes, scales = torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="floating-point"):
        quantize_rows_into(torch.zeros(2, 3, dtype=torch.int32), codes, scales)
    with pytest.raises(ValueError, match="cannot quantize a weight of shape"):
        quantize_rows_into(torch.zeros(2, 3), codes, scales, column_offset=1)
