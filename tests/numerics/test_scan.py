# SPDX-License-Identifier: Apache-2.0
"""Checksums against a sum in Python's integers, NaN and Inf anywhere; the GPU's kernel gives what the CPU gives."""

import pytest
import torch
from engines import in_own_process

from flashrl_verl.refit.scan import Scan

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scan(*tensors: torch.Tensor) -> list[tuple[int, bool]]:
    found = Scan()
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
    assert scan(*(tensor.to(device) for tensor in tensors)) == [(by_hand(tensor), True) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_that_is_not_finite_is_found_anywhere(dtype, device):
    for elements in (1, 8192, 20001):
        sound = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype)
        sound[0] = torch.finfo(dtype).max
        tensors = [sound]
        for bad in (float("nan"), float("inf"), float("-inf")):
            for place in (0, elements // 2, elements - 1):
                tensors.append(sound.clone())
                tensors[-1][place] = bad
        assert [finite for _, finite in scan(*(t.to(device) for t in tensors))] == [True] + [False] * 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tensors_of_all_sizes_have_the_same_checksums_on_both_devices(dtype):
    g = torch.Generator().manual_seed(1)
    tensors = 400 * [torch.randn(n, generator=g).to(dtype) for n in (1, 7, 8191, 8192, 20001, 5_000_003)]
    assert scan(*[tensor.cuda() for tensor in tensors]) == scan(*tensors)


def interpreted() -> None:
    from flashrl_verl.refit import scan as module
    from flashrl_verl.refit import triton_scan

    g = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        tensors = [torch.randn(n, generator=g).to(dtype) for n in 2 * (5, 8192, 20001, 70000)]
        for tensor in tensors[4:]:
            tensor[-1] = float("nan")
        tensors.append(tensors[2][1:])  # not aligned
        expected = [[by_hand(tensor), bad] for tensor, bad in zip(tensors, [0] * 4 + [1] * 4 + [0], strict=True)]
        for triton_scan._PROGRAMS in (1024, 2):
            out, words = torch.zeros(len(tensors), 2, dtype=torch.int64), [t.view(torch.int16) for t in tensors]
            triton_scan.scan_on_gpu(words, out, module._PERIOD, module._EXPONENTS[dtype], dtype.itemsize // 2)
            assert out.tolist() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernel is tested instead")
def test_tritons_interpreter_gives_the_same_checksums(monkeypatch):
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    in_own_process(interpreted)
