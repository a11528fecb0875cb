# SPDX-License-Identifier: Apache-2.0
"""The block-wise arithmetic of ``fp8_block`` against verl's own function and against float64, which share no code with it."""

import numpy as np
import pytest
import torch
from verl.utils.kernel.fp8_kernel import _scaled_fp8_blockwise_pytorch

from flashrl_verl.quantization.formats.fp8 import FORMAT as ROWS
from flashrl_verl.quantization.formats.fp8_block import FORMAT
from flashrl_verl.quantization.gemm import emulated_multiply
from flashrl_verl.quantization.kernels import quantize_into
from flashrl_verl.quantization.numerics import as_bytes, block_scales, dequantize, quantize, spread, sqnr_db

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B = 128
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1])
"""Magnitudes in ascending order: value = 2^(e - 7) (1 + m / 8), subnormal below e = 1, and 0x7F is NaN."""


def random_weight(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Blocks of very different sizes, one of zeros, and one of exact ties and subnormal codes under absmax 448."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows // B, B, columns // B, B, generator=g)
    weight *= torch.logspace(-5, 2, rows * columns // B**2).view(rows // B, 1, columns // B, 1)
    weight[-1, :, -1] = 0
    ties = torch.randint(-16, 17, (B, B), generator=g) * 2.0**-10
    ties[5, 7] = 448.0
    weight[0, :, 0] = ties
    return weight.view(rows, columns).to(dtype)


def reference(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Block by block: scales by IEEE division in float32, the codes' values by search in the grid, in float64."""
    w = weight.float().cpu().numpy()
    n, k = w.shape[0] // B, w.shape[1] // B
    scales, values = np.empty((n, k), np.float32), np.empty(w.shape)
    for i in range(n):
        for j in range(k):
            place = np.s_[i * B : (i + 1) * B, j * B : (j + 1) * B]
            scales[i, j] = np.float32(max(abs(float(x)) for x in w[place].flat)) / np.float32(448)
            if scales[i, j] == 0:
                scales[i, j] = 1
            quotients = w[place] / scales[i, j]
            magnitude = np.minimum(np.abs(quotients.astype(np.float64)), 448)
            above = np.searchsorted(E4M3, magnitude)
            below = np.maximum(above - 1, 0)
            to_above, to_below = E4M3[above] - magnitude, magnitude - E4M3[below]
            up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
            values[place] = np.where(up, E4M3[above], E4M3[below]) * np.where(np.signbit(quotients), -1, 1)
    return values, scales


def quantized(weight: torch.Tensor, device: str, first: int = 0, columns: int | None = None):
    """What the device's kernel writes of some columns, into storage full of marks; and its flag."""
    columns = weight.shape[1] - first if columns is None else columns
    codes = torch.empty(weight.shape[0], columns, dtype=FORMAT.dtype, device=device)
    as_bytes(codes).fill_(FORMAT.unwritten)
    scales = torch.full(FORMAT.scale_shape(*codes.shape), float("nan"), device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    quantize_into(weight.to(device), codes, scales, FORMAT, first, flag)
    return codes.cpu(), scales.cpu(), int(flag)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_a_recomputation_block_by_block(dtype, device):
    for seed, (rows, columns) in enumerate([(B, B), (2 * B, 3 * B), (3 * B, B)]):
        weight = random_weight(seed, rows, columns, dtype)
        codes, scales, flag = quantized(weight, device)
        values, expected_scales = reference(weight)
        np.testing.assert_array_equal(scales.numpy(), expected_scales)
        np.testing.assert_array_equal(codes.double().numpy(), values)
        assert np.array_equal(np.signbit(codes.float().numpy()), np.signbit(values)), "-0 is a code of its own"
        assert flag == 0


def assert_equal_up_to_ties(weight: torch.Tensor, ours: tuple, theirs: tuple, ulps: int) -> torch.Tensor:
    """Scales within so many ulps; a code of theirs that differs is the neighbour, and in float64 the weight lies between both.

    Args:
        weight: [N, K].
        ours: codes [N, K] and scales [N / B, K / B].
        theirs: the same; where a block is zeros its scale means nothing.
        ulps: units in the last place.

    Returns:
        Where codes differ, [N, K] bool.
    """
    (codes, scales), (their_codes, their_scales) = ours, theirs
    filled = weight.unflatten(-1, (-1, B)).unflatten(-3, (-1, B)).abs().amax((-3, -1)) > 0
    apart = (scales.view(torch.int32) - their_scales.contiguous().view(torch.int32)).abs()
    assert filled.any() and apart[filled].max() <= ulps
    one, other = as_bytes(codes).int(), as_bytes(their_codes.contiguous()).int()
    assert (one - other).abs().max() <= 1
    quotient = weight.double() / spread(scales, weight.shape).double()
    middle = (codes.double() + their_codes.double()) / 2
    differ = one != other
    assert ((quotient - middle).abs() <= 1e-6 * quotient.abs())[differ].all(), "further from the weight, not at a tie"
    return differ


def test_verls_own_blocks_are_the_same_up_to_its_multiplication_by_a_reciprocal():
    """verl computes 448 / absmax, its reciprocal as the scale, and multiplies: scales within an ulp or two, and where a product
    lands on the other side of a tie the neighbouring code."""
    weight = random_weight(3, 4 * B, 4 * B)
    codes, scales, _ = quantized(weight, "cpu")
    theirs, their_scales = _scaled_fp8_blockwise_pytorch(weight.clone(), (B, B))
    differ = assert_equal_up_to_ties(weight, (codes, scales), (theirs, their_scales.squeeze(-1)), ulps=2)
    assert differ.float().mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_verls_triton_blocks_which_its_gpus_use_are_the_same_up_to_two_quotients(dtype):
    """verl computes absmax / 448 and the reciprocal of that, with Triton's division, which is off by an ulp or two, and
    multiplies. A block whose scale is off has all its exact ties on one side: they are in block [0, 0]."""
    from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise_triton

    weight = random_weight(3, 4 * B, 4 * B, dtype)
    codes, scales, _ = quantized(weight, "cuda")
    theirs, their_scales = (t.cpu() for t in scaled_fp8_blockwise_triton(weight.cuda(), (B, B)))
    differ = assert_equal_up_to_ties(weight, (codes, scales), (theirs, their_scales), ulps=4)
    differ[:B, :B] = False
    assert differ.float().mean() < 5e-3  # with scales 2 ulps too small, which is the most, 2e-3 of these BF16 codes


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_the_columns_has_the_codes_and_scales_of_the_whole(device):
    weight = random_weight(4, 2 * B, 4 * B)
    whole, whole_scales = quantize(weight, FORMAT)
    for first in (0, B, 2 * B):
        codes, scales, _ = quantized(weight, device, first, 2 * B)
        assert torch.equal(as_bytes(codes), as_bytes(whole[:, first : first + 2 * B]))
        assert torch.equal(scales, whole_scales[:, first // B : first // B + 2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_raises_the_flag_and_leaves_its_scale_not_finite(value, device):
    weight = random_weight(5, 2 * B, 3 * B)
    weight[B + 3, 2 * B + 100] = value
    _, scales, flag = quantized(weight, device)
    assert flag == 1
    assert (~scales.isfinite()).nonzero().tolist() == [[1, 2]]
    _, _, flag = quantized(weight, device, 0, 2 * B)
    assert flag == 0, "that block is another rank's"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_a_view_of_a_wider_tensor_are_read_where_they_lie(device):
    wide = random_weight(6, 2 * B, 4 * B).to(device)
    view = wide[B:, B : 3 * B]
    codes, scales, _ = quantized(view, device)
    expected, expected_scales = quantize(view.cpu().contiguous(), FORMAT)
    assert torch.equal(as_bytes(codes), as_bytes(expected)) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_too_small_or_large_for_the_fast_quotient_are_divided(device):
    weight = random_weight(7, B, 2 * B, torch.float32)
    weight[:, :B] *= 2.0**-100 / weight[:, :B].abs().max()
    weight[:, B:] = torch.randn(B, B, generator=torch.Generator().manual_seed(8)) * 2.0**100
    codes, scales, flag = quantized(weight, device)
    values, expected_scales = reference(weight)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.double().numpy(), values)
    assert flag == 0


@pytest.mark.parametrize(
    "rows, columns, first",
    [(B + 8, B, 0), (B, B - 8, 0), (B, B, 64)],
    ids=["rows", "columns", "offset"],
)
def test_what_is_not_whole_blocks_is_refused(rows, columns, first):
    codes = torch.zeros(rows, columns, dtype=FORMAT.dtype)
    with pytest.raises(ValueError, match="cannot quantize"):
        quantize_into(torch.zeros(rows, 2 * B), codes, torch.zeros(rows // B, max(1, columns // B)), FORMAT, first)


def test_scales_by_block_save_what_an_outlier_costs_a_whole_row():
    """A value 1000 times the others': its row loses what E4M3 cannot hold below it, blocks only where it stands."""
    weight = torch.randn(2 * B, 8 * B, generator=torch.Generator().manual_seed(9)) * 0.02
    weight[:, 5] = 2000.0
    rest = torch.ones(8 * B, dtype=torch.bool)
    rest[:B] = False
    by_block, by_row = (dequantize(*quantize(weight, fmt))[:, rest] for fmt in (FORMAT, ROWS))
    assert sqnr_db(weight[:, rest], by_block) > 30 > 20 > sqnr_db(weight[:, rest], by_row)


def test_the_emulated_product_is_w8a8_with_groups_of_tokens_in_float64():
    g = torch.Generator().manual_seed(10)
    weight = random_weight(11, 2 * B, 3 * B)
    x = torch.randn(5, 3 * B, generator=g).bfloat16()
    x[:, B : 2 * B] *= 100  # groups of a token have scales of their own
    codes, scales = quantize(weight, FORMAT)
    expected = torch.zeros(5, 2 * B, dtype=torch.float64)
    for j in range(3):
        place = slice(j * B, (j + 1) * B)
        group = x[:, place].double()
        scale = group.abs().amax(1, keepdim=True) / 448
        tokens = (group / scale).to(torch.float8_e4m3fn).double() * scale
        for i in range(2):
            block = codes[i * B : (i + 1) * B, place].double() * scales[i, j].double()
            expected[:, i * B : (i + 1) * B] += tokens @ block.t()
    out = emulated_multiply(x, codes, scales, FORMAT)
    assert out.dtype == torch.bfloat16
    assert sqnr_db(expected, out) > 50  # the rounding of the output to BF16


def test_a_scale_spreads_over_its_block_only():
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    spread_out = spread(scales, (2 * B, 2 * B))
    for i in range(2):
        for j in range(2):
            assert (spread_out[i * B : (i + 1) * B, j * B : (j + 1) * B] == scales[i, j]).all()


def test_block_scales_of_experts_are_those_of_each():
    weight = torch.stack([random_weight(seed, 2 * B, B) for seed in (12, 13)])
    assert torch.equal(block_scales(weight, FORMAT), torch.stack([block_scales(w, FORMAT) for w in weight]))
