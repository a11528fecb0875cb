# SPDX-License-Identifier: Apache-2.0
"""Rotation leaves a layer's product as it is, and INT8 products of real activations' shape come nearer to it."""

import numpy as np
import pytest
import torch
from references import hadamard, sqnr_db

from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.formats import INT8, INT8_UNROTATED
from flashrl_verl.quantization.gemm import linear_kernel, token_quantizer
from flashrl_verl.quantization.numerics import quantize_rows, rotate, rotate_weight
from flashrl_verl.quantization.rows import quantize_rows_into

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


SHAPES = {  # hidden size, heads, their size, channels between gate/up and down
    "Qwen2.5-0.5B": (896, 14, 64, 4864),
    "Qwen2.5-3B": (2048, 16, 128, 11008),
    "Qwen2.5-7B": (3584, 28, 128, 18944),
    "Qwen2.5-32B": (5120, 40, 128, 27648),
    "Qwen2.5-72B": (8192, 64, 128, 29568),
    "Qwen3-30B-A3B": (2048, 32, 128, 768),
    "Llama-3.1-70B": (8192, 64, 128, 28672),
    "Gemma-2-27B": (4608, 32, 128, 36864),
}
SMALLER = {("Qwen2.5-3B", 8): 32, ("Qwen2.5-72B", 4): 32, ("Qwen2.5-72B", 8): 16, ("Qwen3-30B-A3B", 8): 32}
"""Blocks of down_proj that are not 64, by tensor parallelism."""


@pytest.mark.parametrize("model", SHAPES)
def test_the_blocks_of_models_that_people_train(model):
    hidden, heads, size, mlp = SHAPES[model]
    for ranks in (1, 2, 4, 8):
        if heads % ranks == 0:
            widths = (hidden, heads * size // ranks, mlp // ranks)
            assert [INT8.block(columns) for columns in widths] == [64, 64, SMALLER.get((model, ranks), 64)]


def test_a_layer_that_16_does_not_divide_stays_unrotated():
    assert [INT8.block(columns) for columns in (48, 40, 8, 1, 344)] == [16, 1, 1, 1, 1]


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
    product = rotate_weight(weight, block).double() @ rotate(x, block).double().t()
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
