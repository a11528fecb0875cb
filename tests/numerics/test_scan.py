# SPDX-License-Identifier: Apache-2.0
"""Checksums against a sum in Python's integers, NaN and Inf anywhere; the GPU's kernel gives what the CPU gives."""

import pytest
import torch

from flashrl_verl.refit.scan import Scan

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scan(*tensors: torch.Tensor) -> list[tuple[int, bool]]:
    found = Scan()
    for tensor in tensors:
        found.add(tensor)
    return found.results()


def by_hand(tensor: torch.Tensor) -> int:
    words = tensor.cpu().reshape(-1).view(torch.int16).tolist()
    return sum(word * (1 + i % 8191) for i, word in enumerate(words))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_equal_a_sum_of_sixteen_bit_words_weighted_by_position(dtype, device):
    g = torch.Generator().manual_seed(9)
    tensors = [
        torch.randn(shape, generator=g).to(dtype).to(device) for shape in ((33, 65), (130, 201), (), (1,), (8191, 3))
    ]
    tensors.append(torch.full((20001,), -float(torch.finfo(dtype).max), dtype=dtype, device=device))  # the largest sums
    assert scan(*tensors) == [(by_hand(tensor), True) for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_of_both_devices_are_equal(dtype):
    g = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(n, generator=g).to(dtype) for n in (1, 7, 8191, 8192, 20001, 5_000_003)
    ] * 400  # more than one block
    assert scan(*[tensor.cuda() for tensor in tensors]) == scan(*tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 8192, 20001])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_anywhere(elements, dtype, bad, device):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    tensor[0] = torch.finfo(dtype).max
    broken = [tensor.clone() for _ in range(3)]
    for one, place in zip(broken, (0, elements // 2, elements - 1), strict=True):
        one[place] = bad
    assert [finite for _, finite in scan(tensor, *broken)] == [True, False, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_changed_places_are_seen_and_any_dtype_and_stride_is_taken(device):
    tensor = torch.randn(50, 512, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    flags = torch.tensor([True, False, True], device=device)
    sums = [
        total for total, _ in scan(tensor, tensor.flip(0), flags, flags.roll(1), tensor.t(), tensor.t().contiguous())
    ]
    assert sums[0] != sums[1] and sums[2] != sums[3] and sums[4] == sums[5]
    assert [finite for _, finite in scan(torch.empty(0, device=device), torch.arange(9, device=device))] == [True, True]
