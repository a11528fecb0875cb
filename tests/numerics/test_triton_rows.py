# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, where there is no GPU: the rows of ``numerics``, the checksums of
``scan``.

The interpreter's FMA rounds twice, so its rows are divided; the exact quotient by FMAs is the compiled kernel's
(test_rows.py). The interpreter is chosen by an environment variable that Triton reads when it is imported, hence the
process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

CODE = """
import torch
import triton.language as tl
from flashrl_verl.quantization import kernels, numerics, triton_rows
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.refit import scan, triton_scan
from flashrl_verl.settings import Precision

FORMAT = weight_format(Precision.INT8)
kernels._MAX_IN_REGISTERS, kernels._LONG_ROWS = 128, ((1000, 64, 4),)
triton_rows._MOST = tl.constexpr(0.0)
for seed, (dtype, columns) in enumerate((d, k) for d in (torch.bfloat16, torch.float32) for k in (33, 64, 65, 200)):
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[3] = 0
    weight[4, 2], weight[5, 1] = float("nan"), float("inf")
    width, first = columns // 2, columns // 4
    codes, scales = torch.zeros(9, width, dtype=torch.int8), torch.zeros(9, 1)
    kernels._launch(weight, codes, scales, FORMAT, first)
    whole = numerics.row_scales(weight, FORMAT)
    expected, _ = numerics.quantize_rows(weight[:, first : first + width], FORMAT, whole)
    finite = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(codes[finite], expected[finite]), (dtype, columns)
    assert torch.equal(scales[finite], whole[finite]), (dtype, columns)
    assert scales[4].isnan() and scales[5].isinf(), (dtype, columns)

g = torch.Generator().manual_seed(0)
for dtype, step in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 2)):
    for programs in (1024, 2):
        triton_scan._PROGRAMS = programs
        tensors = [torch.randn(n, generator=g).to(dtype) for n in 2 * (5, 8192, 20001, 70000)]
        for tensor in tensors[4:]:
            tensor[-1] = float("nan")
        words = [tensor.view(torch.int16) for tensor in tensors]
        words.append(words[2][step:])  # not aligned
        out = torch.zeros(len(words), 2, dtype=torch.int64)
        triton_scan.scan_on_gpu(words, out, 8191, scan._EXPONENTS[dtype], step)
        expected = [[int(scan._checksum(one)), bad] for one, bad in zip(words, [0, 0, 0, 0, 1, 1, 1, 1, 0])]
        assert out.tolist() == expected, dtype
print("SAME")
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the compiled kernels are tested instead (test_rows.py, test_scan.py)"
)
def test_the_kernels_give_what_torch_gives():
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    result = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=800)
    assert "SAME" in result.stdout, result.stderr[-2000:]
