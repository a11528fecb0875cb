# SPDX-License-Identifier: Apache-2.0
"""The GPU's checksum and check for Inf and NaN against those of the CPU."""

import pytest
import torch

from flashrl_verl.rollout.receipt import all_finite, checksum

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 7, 8191, 8192, 20001, 5_000_003])
def test_checksums_of_both_devices_are_equal(elements, dtype):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    assert int(checksum(tensor.cuda())) == int(checksum(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 8192, 20001])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_anywhere(elements, dtype, bad):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    tensor[0] = torch.finfo(dtype).max
    assert bool(all_finite(tensor))
    for place in {0, elements // 2, elements - 1}:
        broken = tensor.clone()
        broken[place] = bad
        assert not bool(all_finite(broken))
