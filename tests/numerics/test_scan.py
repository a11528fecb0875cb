# SPDX-License-Identifier: Apache-2.0
"""Checksums against a sum in Python's integers; the GPU's kernel gives what the CPU gives."""

import pytest
import torch

from flashrl_verl.refit.scan import Checksums

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def checksums(*tensors: torch.Tensor) -> list[int]:
    found = Checksums()
    found.add(*tensors)
    return found.results()


def by_hand(tensor: torch.Tensor) -> int:
    words = tensor.cpu().reshape(-1).view(torch.int16).tolist()
    return sum(word * (1 + i % 8191) for i, word in enumerate(words))


@pytest.mark.parametrize("device", DEVICES)
def test_checksums_equal_a_sum_of_sixteen_bit_words_weighted_by_position(device):
    g, tensors = torch.Generator().manual_seed(9), [torch.arange(9)]
    for dtype in DTYPES:
        tensors += [
            torch.randn(shape, generator=g).to(dtype) for shape in ((33, 65), (130, 201), (), (8191, 3), (0, 4))
        ]
        tensors.append(torch.full((20001,), -float(torch.finfo(dtype).max), dtype=dtype))  # the largest sums
        tensors.append(tensors[-5].t())
    tensors.append(tensors[1].to(torch.float8_e4m3fn)[:32])
    assert checksums(*(tensor.to(device) for tensor in tensors)) == [by_hand(tensor) for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tensors_of_all_sizes_have_the_same_checksums_on_both_devices(dtype):
    g = torch.Generator().manual_seed(1)
    tensors = 400 * [torch.randn(n, generator=g).to(dtype) for n in (1, 7, 8191, 8192, 20001, 5_000_003)]
    assert checksums(*[tensor.cuda() for tensor in tensors]) == checksums(*tensors)
