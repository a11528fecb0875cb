# SPDX-License-Identifier: Apache-2.0
"""Rotation leaves a layer's product as it is, and INT8 products of real activations' shape come nearer to it."""

import numpy as np
import pytest
import torch
from references import block_of, hadamard, sqnr_db

from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.formats import INT8, INT8_UNROTATED
from flashrl_verl.quantization.gemm import linear_kernel, token_quantizer
from flashrl_verl.quantization.numerics import quantize_rows, rotate, rotate_weight
from flashrl_verl.quantization.rows import quantize_rows_into

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("columns, block", [(64 * 7, 64), (96, 32), (48, 16), (40, 1), (8, 1), (1, 1), (344, 1)])
def test_a_block_is_a_power_of_two_from_16_to_64_that_divides_the_columns_or_there_is_none(columns, block):
    assert INT8.block(columns) == block == block_of(columns)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_rotation_is_the_hadamard_matrix_and_products_are_what_they_were(block):
    g = torch.Generator().manual_seed(block)
    weight, x = torch.randn(9, 4 * block, generator=g), torch.randn(5, 4 * block, generator=g)
    matrix = torch.from_numpy(hadamard(np.eye(block)))
    rows, columns = torch.meshgrid(torch.arange(block), torch.arange(block), indexing="ij")
    odd = torch.tensor([bin(int(shared)).count("1") % 2 for shared in (rows & columns).flatten()]).view(block, block)
    assert torch.equal(matrix, 1.0 - 2.0 * odd) and torch.equal(matrix @ matrix, block * torch.eye(block).double())
    by_matrix = (x.double().view(5, -1, block) @ matrix).flatten(1)
    torch.testing.assert_close(rotate(x, block).double(), by_matrix, rtol=0, atol=1e-5)
    product = rotate_weight(weight.double(), block).double() @ rotate(x.double(), block).double().t()
    torch.testing.assert_close(product, weight.double() @ x.double().t(), rtol=1e-5, atol=1e-5)


def outliers(tokens: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Activations with a few channels that are 30 times as large, as language models have, and a token of zeros."""
    g = torch.Generator().manual_seed(columns + tokens)
    x = torch.randn(tokens, columns, generator=g)
    x[:, :: columns // 5] *= 30
    x[tokens // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [512, 896])
def test_a_layer_with_outlier_channels_comes_ten_times_nearer_to_its_product_when_rotated(device, columns):
    """In power of the noise, 10 dB."""
    register()
    x = outliers(64, columns).to(device)
    weight = torch.randn(128, columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    exact, ratios = x.double() @ weight.double().t(), []
    for fmt in (INT8, INT8_UNROTATED):
        codes, scales = torch.empty(weight.shape, dtype=torch.int8, device=device), torch.empty(128, 1, device=device)
        quantize_rows_into(weight, codes, scales, fmt)
        ratios.append(sqnr_db(exact, linear_kernel(fmt)(x, codes, scales, None)))
    assert ratios[0] > 36 and ratios[0] > ratios[1] + 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [48, 96, 896, 1848 * 2, 4864, 5120, 8192, 8960, 27648, 32832])
def test_a_gpus_tokens_are_the_references_but_for_the_order_of_sums(columns, dtype):
    for tokens in (1, 5, 300):
        x = outliers(tokens, columns, dtype)
        rotated = rotate(x, INT8.block(columns))
        expected, expected_scales = quantize_rows(rotated, INT8)
        codes, scales = (part.cpu() for part in token_quantizer(INT8)(x.cuda()))
        ulps = (scales.view(torch.int32) - expected_scales.view(torch.int32)).abs()
        apart = (codes.int() - expected.int()).abs()
        assert ulps.max() <= 2 and apart.max() <= 1 and apart.float().mean() <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [896, 27648])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_shows_in_its_scale_only(columns, value):
    x = outliers(9, columns).cuda()
    x[3, columns - 1] = value
    finite = token_quantizer(INT8)(x)[1].isfinite().flatten()
    assert finite.tolist() == [token != 3 for token in range(9)]
