# SPDX-License-Identifier: Apache-2.0
"""The Triton row kernel in Triton's interpreter, where there is no GPU: same codes and scales as ``numerics``.

The interpreter is chosen by an environment variable that Triton reads when it is imported, hence the process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

CODE = """
import torch
from flashrl_verl.quantization import kernels, numerics
from flashrl_verl.quantization.formats.int8 import FORMAT

kernels._MAX_IN_REGISTERS, kernels._LONG_ROWS = 128, ((1000, 64, 4),)
for seed, (dtype, columns) in enumerate((d, k) for d in (torch.bfloat16, torch.float32) for k in (33, 64, 65, 200)):
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[3] = 0
    weight[4, 2], weight[5, 1] = float("nan"), float("inf")
    width, first = columns // 2, columns // 4
    codes, scales = torch.zeros(9, width, dtype=torch.int8), torch.zeros(9, 1)
    flag = torch.zeros(1, dtype=torch.int32)
    kernels._triton_quantize_rows_into(weight, codes, scales, FORMAT, first, flag)
    whole = numerics.row_scales(weight, FORMAT)
    expected, _ = numerics.quantize_rows(weight[:, first : first + width], FORMAT, whole)
    assert flag.item() == 1
    finite = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(codes[finite], expected[finite]), (dtype, columns)
    assert torch.equal(scales[finite], whole[finite]), (dtype, columns)
    assert scales[4].isnan() and scales[5].isinf(), (dtype, columns)
print("SAME")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernel is tested instead (test_rows.py)")
def test_the_kernel_gives_the_codes_of_numerics_for_one_and_for_two_passes():
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    result = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=250)
    assert "SAME" in result.stdout, result.stderr[-2000:]
