# SPDX-License-Identifier: Apache-2.0
"""The row-wise arithmetic of both formats against a numpy float32 recomputation that shares no code with it."""

import numpy as np
import pytest
import torch

from flashrl_verl.quantization.formats import FP8, INT8
from flashrl_verl.quantization.kernels import quantize_rows_into
from flashrl_verl.quantization.numerics import WeightFormat, as_bytes, dequantize, quantize_rows, row_scales, sqnr_db

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [pytest.param(INT8, id="int8"), pytest.param(FP8, id="fp8")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NEVER = {"int8": 0x80, "fp8": 0x7F}
"""A byte that no finite row becomes."""


def e4m3_grid() -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes of E4M3 in ascending order, and their bytes: value = 2^(e - 7) (1 + m / 8), subnormal below e = 1,
    0x7F NaN."""
    values = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
    return np.array(values[:-1]), np.arange(127, dtype=np.uint8)


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes of the nearest E4M3 values in float64; ties to the even mantissa, magnitudes past 448 to 448."""
    values, codes = e4m3_grid()
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.searchsorted(values, magnitude)
    below = np.maximum(above - 1, 0)
    to_above, to_below = values[above] - magnitude, magnitude - values[below]
    up = (to_above < to_below) | ((to_above == to_below) & (codes[above] % 2 == 0))
    return np.where(up, codes[above], codes[below]) | (np.signbit(x).astype(np.uint8) << 7)


def reference(weight: torch.Tensor, fmt: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """numpy float32, row by row: IEEE division, numpy's rint is round-half-even. Codes as bytes."""
    w = weight.float().cpu().numpy()
    scales = np.empty((w.shape[0], 1), dtype=np.float32)
    for n, row in enumerate(w):
        absmax = np.float32(max(abs(float(x)) for x in row))
        scales[n] = absmax / np.float32(fmt.code_max)
        if scales[n] == 0:
            scales[n] = 1
    quotients = w / scales
    assert quotients.dtype == np.float32
    if fmt.name == "int8":
        return np.clip(np.rint(quotients), -127, 127).astype(np.int8).view(np.uint8), scales
    return round_to_e4m3(quotients), scales


def random_weight(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Shapes no tile divides, rows of very different sizes, zero rows and exact ties."""
    g = torch.Generator().manual_seed(seed)
    n, k = (int(torch.randint(1, high, (1,), generator=g)) for high in (70, 400))
    weight = torch.randn(n, k, generator=g) * torch.logspace(-6, 3, n).unsqueeze(1)
    weight[int(torch.randint(n, (1,), generator=g))] = 0
    ties = torch.randint(-254, 255, (k,), generator=g) * 0.5  # absmax 127 would make every half a tie
    ties[0] = 127.0
    weight[int(torch.randint(n, (1,), generator=g))] = ties
    ties = torch.randint(-16, 17, (k,), generator=g) * 2.0**-10  # subnormal E4M3 and the ties between, under absmax 448
    ties[0] = 448.0
    weight[int(torch.randint(n, (1,), generator=g))] = ties
    return weight.to(dtype)


def quantized(weight: torch.Tensor, fmt: WeightFormat, device: str) -> tuple[np.ndarray, np.ndarray]:
    """What the device's kernel writes; the storage is full of bytes that it never writes."""
    codes = torch.empty(weight.shape, dtype=fmt.dtype, device=device)
    as_bytes(codes).fill_(NEVER[fmt.name])
    scales = torch.full((weight.shape[0], 1), float("nan"), device=device)
    quantize_rows_into(weight.to(device), codes, scales, fmt)
    return as_bytes(codes).cpu().numpy(), scales.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_and_scales_equal_a_recomputation_exactly(device, dtype, fmt):
    for seed in range(100):
        weight = random_weight(seed, dtype)
        codes, scales = quantized(weight, fmt, device)
        expected_codes, expected_scales = reference(weight, fmt)
        np.testing.assert_array_equal(scales, expected_scales)
        np.testing.assert_array_equal(codes, expected_codes)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_reference_itself_knows_a_rounding_error(fmt):
    """One float32 unit in the last place of a scale changes codes: the comparison above is not blind."""
    weight = random_weight(3, torch.float32)
    codes, scales = reference(weight, fmt)
    other = quantize_rows(weight, fmt, torch.from_numpy(np.nextafter(scales, np.float32(0))))[0]
    assert (as_bytes(other).numpy() != codes).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_parallel_shard_has_the_codes_and_scales_of_the_whole_row(device, fmt):
    for seed in range(20):
        weight = random_weight(seed, torch.bfloat16)
        if weight.shape[1] < 8:
            continue
        whole, scales = quantize_rows(weight, fmt)
        cut = weight.shape[1] // 4
        for first, width in ((0, cut), (cut, cut), (weight.shape[1] - cut, cut)):
            codes = torch.zeros(weight.shape[0], width, dtype=fmt.dtype, device=device)
            shard_scales = torch.zeros(weight.shape[0], 1, device=device)
            quantize_rows_into(weight.to(device), codes, shard_scales, fmt, column_offset=first)
            assert torch.equal(as_bytes(codes).cpu(), as_bytes(whole[:, first : first + width].contiguous()))
            assert torch.equal(shard_scales.cpu(), scales)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5120, 8192, 8193, 16384, 16385, 27648, 65536])
def test_rows_of_every_length_have_the_same_codes(columns, dtype, fmt):
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    codes, scales = quantized(weight, fmt, "cuda")
    expected_codes, expected_scales = quantize_rows(weight, fmt)
    np.testing.assert_array_equal(codes, as_bytes(expected_codes).numpy())
    np.testing.assert_array_equal(scales, expected_scales.numpy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_sources_and_destinations_are_honoured(device, fmt):
    g = torch.Generator().manual_seed(3)
    big = torch.randn(40, 90, generator=g).bfloat16().to(device)
    weight = big.t()[3:50, ::2]  # neither stride is one
    storage = torch.zeros(60, 30, dtype=fmt.dtype, device=device)
    codes = storage[5:52, 4:24]
    scales = torch.zeros(47, 1, device=device)
    quantize_rows_into(weight, codes, scales, fmt)
    expected_codes, expected_scales = reference(weight, fmt)
    stored = as_bytes(storage).cpu()
    np.testing.assert_array_equal(stored[5:52, 4:24].numpy(), expected_codes)
    np.testing.assert_array_equal(scales.cpu().numpy(), expected_scales)
    assert not stored[:5].any() and not stored[:, :4].any() and not stored[:, 24:].any()


@pytest.mark.parametrize("fmt, relative", [(INT8, 0.0), (FP8, 2.0**-4)], ids=["int8", "fp8"])
def test_the_error_is_at_most_half_a_step_of_the_grid(fmt, relative):
    """INT8: half a scale. E4M3: half of 2^-3 of the value, or half of the smallest subnormal, 2^-9 scales."""
    weight = random_weight(11, torch.float32)
    codes, scales = quantize_rows(weight, fmt)
    error = (weight.double() - dequantize(codes, scales).double()).abs()
    step = torch.maximum(weight.double().abs() * relative, scales.double() * (0.5 if fmt.name == "int8" else 2.0**-10))
    assert (error <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_are_symmetric_and_never_all_bytes(fmt):
    for seed in range(10):
        weight = random_weight(seed, torch.bfloat16)
        codes, _ = quantize_rows(weight, fmt)
        assert torch.equal(quantize_rows(-weight, fmt)[0].float(), -codes.float())
        assert not (as_bytes(codes) == NEVER[fmt.name]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_show_in_the_scale_of_their_row_only(device, fmt, dtype, bad):
    weight = torch.randn(6, 33, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight[2, 7] = bad
    codes = torch.zeros(6, 33, dtype=fmt.dtype, device=device)
    scales = torch.zeros(6, 1, device=device)
    quantize_rows_into(weight.to(device), codes, scales, fmt)
    assert [bool(x) for x in scales.isfinite().flatten()] == [True, True, False, True, True, True]


@pytest.mark.parametrize("fmt", FORMATS)
def test_subnormal_rows_neither_overflow_nor_divide_by_zero(fmt):
    tiny = torch.tensor([[1e-45 * 60, 0.0], [1.4e-45 * 190, 1.4e-45], [9.2e-41, -9.2e-41]], dtype=torch.float32)
    codes, scales = quantize_rows(tiny, fmt)
    assert scales.isfinite().all() and (scales > 0).all()
    assert codes.float().abs().max() <= fmt.code_max


@pytest.mark.parametrize("fmt", FORMATS)
def test_compressed_tensors_gives_the_same_codes_for_our_scales(fmt):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = QuantizationArgs(
        num_bits=8,
        type=QuantizationType.INT if fmt.name == "int8" else QuantizationType.FLOAT,
        strategy=QuantizationStrategy.CHANNEL,
        symmetric=True,
        dynamic=False,
    )
    for seed in range(100):
        weight = random_weight(seed, torch.float32)
        codes, scales = quantize_rows(weight, fmt)
        zero_points = torch.zeros_like(scales, dtype=torch.int8) if fmt.name == "int8" else None
        theirs = quantize(weight, scales, zero_points, args, dtype=fmt.dtype)
        assert torch.equal(theirs.float(), codes.float())


@pytest.mark.parametrize("fmt, low, high", [(INT8, 39.0, 43.0), (FP8, 31.0, 32.5)], ids=["int8", "fp8"])
def test_sqnr_of_gaussian_rows_is_that_of_the_format(fmt, low, high):
    """INT8: a row of 4096 has absmax near 3.9 sigma, 10 log10(12 / (3.9 / 127)^2) = 41 dB. E4M3: a step is 2^-3 of the
    binade, and a density that is flat within a binade has x^2 = 7/3 of its square: 10 log10(12 * 64 * 7/3) = 32.5 dB; a
    Gaussian's falls."""
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_rows(weight, fmt)
    assert low < sqnr_db(weight, dequantize(codes, scales)) < high


@pytest.mark.parametrize("fmt", FORMATS)
def test_row_scales_rejects_nothing_but_shows_zero_rows_as_one(fmt):
    assert row_scales(torch.zeros(2, 3), fmt).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("fmt", FORMATS)
def test_integer_sources_and_misfitting_storage_are_refused(fmt):
    codes, scales = torch.zeros(2, 3, dtype=fmt.dtype), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="float32 weight to quantize, got torch.int32"):
        quantize_rows_into(torch.zeros(2, 3, dtype=torch.int32), codes, scales, fmt)
    with pytest.raises(ValueError, match="cannot quantize a weight of shape"):
        quantize_rows_into(torch.zeros(2, 3), codes, scales, fmt, column_offset=1)
    with pytest.raises(ValueError, match="codes .* of format"):
        quantize_rows_into(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.uint8), scales, fmt)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_million_quotients_are_rounded_as_ieee_division_rounds_them(fmt, dtype):
    """The kernel divides by multiplication: many scales, and columns beside exact ties, where one ulp changes a
    code."""
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
