# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, where there is no GPU: the rows of ``numerics``, copies and checksums.

The interpreter's FMA rounds twice, so its rows are divided; the exact quotient by FMAs is the compiled kernel's (test_rows.py).
The interpreter is chosen by an environment variable that Triton reads when it is imported, hence the process of its own.
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
from flashrl_verl.quantization.formats.int8 import FORMAT

kernels._MAX_IN_REGISTERS, kernels._LONG_ROWS = 128, ((1000, 64, 4),)
triton_rows._MOST = tl.constexpr(0.0)
for seed, (dtype, columns) in enumerate((d, k) for d in (torch.bfloat16, torch.float32) for k in (33, 64, 65, 200)):
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[3] = 0
    weight[4, 2], weight[5, 1] = float("nan"), float("inf")
    width, first = columns // 2, columns // 4
    codes, scales = torch.zeros(9, width, dtype=torch.int8), torch.zeros(9, 1)
    flag = torch.zeros(1, dtype=torch.int32)
    kernels.launch_rows(weight, codes, scales, FORMAT, first, flag, rows=9)
    whole = numerics.row_scales(weight, FORMAT)
    expected, _ = numerics.quantize_rows(weight[:, first : first + width], FORMAT, whole)
    assert flag.item() == 1
    finite = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(codes[finite], expected[finite]), (dtype, columns)
    assert torch.equal(scales[finite], whole[finite]), (dtype, columns)
    assert scales[4].isnan() and scales[5].isinf(), (dtype, columns)
print("SAME")
"""

TABLES = """
import torch
import triton.language as tl
from flashrl_verl.quantization import kernels, numerics, triton_rows
from flashrl_verl.quantization.formats.int8 import FORMAT
from flashrl_verl.quantization.row_table import RowJob, RowTable
from flashrl_verl.rollout import receipt, triton_scan

kernels._MAX_IN_REGISTERS, kernels._LONG_ROWS = 128, ((1000, 64, 4),)
triton_rows._MOST = tl.constexpr(0.0)
g = torch.Generator().manual_seed(0)
for dtype in (torch.bfloat16, torch.float32):
    for columns, first in ((48, 16), (33, 5), (200, 7)):
        width = columns // 2
        bucket = torch.randn(60 * columns + 3, generator=g).to(dtype)
        parts, at = [], 0
        for rows, gap in ((4, 0), (6, columns), (2, 3), (10, 0)):
            at += gap
            parts.append(bucket[at : at + rows * columns].view(rows, columns))
            at += rows * columns
        codes, scales = torch.zeros(40, width, dtype=torch.int8), torch.zeros(40, 1)
        order, starts = [2, 0, 3, 1], {}
        row = 5
        for i in order:
            starts[i] = row
            row += len(parts[i]) + 1
        places = [slice(starts[i], starts[i] + len(part)) for i, part in enumerate(parts)]
        jobs = [RowJob(part, codes[rows], scales[rows], FORMAT, first) for part, rows in zip(parts, places)]
        groups = {}
        for job in jobs:
            groups.setdefault(job.geometry(), []).append(job)
        flag = torch.zeros(1, dtype=torch.int32)
        expected, expected_scales = codes.clone(), scales.clone()
        for step in range(2):
            for group in groups.values():
                if step == 0:
                    group.append(RowTable(group))
                group[-1].launch(group[0].weight, flag)
            for part, rows in zip(parts, places):
                whole = numerics.row_scales(part, FORMAT)
                expected[rows] = numerics.quantize_rows(part[:, first : first + width], FORMAT, whole)[0]
                expected_scales[rows] = whole
            assert torch.equal(codes, expected) and torch.equal(scales, expected_scales), (dtype, columns, step)
            assert not flag.item()
            bucket.mul_(torch.randn(bucket.shape, generator=g).to(dtype))
        parts[3][9, columns - 1] = float("inf")
        for group in groups.values():
            group[-1].launch(group[0].weight, flag)
        assert flag.item() == 1

triton_scan._BLOCK, triton_scan._PIECES = 64, 2
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    source, target = torch.randn(2000, generator=g).to(dtype), torch.zeros(2000, dtype=dtype)
    places = [(0, 1000, 128), (200, 0, 7), (400, 300, 600), (1100, 1500, 1), (1200, 950, 16)]
    table = triton_scan.CopyTable([(source[s : s + n], target[t : t + n]) for s, t, n in places])
    flag = torch.zeros(1, dtype=torch.int32)
    table.launch(source[:128], flag)
    expected = torch.zeros_like(target)
    for s, t, n in places:
        expected[t : t + n] = source[s : s + n]
    assert torch.equal(target, expected) and not flag.item(), dtype
    source[150] = float("nan")  # in none of the copies
    table.launch(source[:128], flag)
    assert not flag.item()
    source[999] = float("-inf")
    table.launch(source[:128], flag)
    assert flag.item() == 1 and target[899] == float("-inf"), dtype

triton_scan._BLOCK = 8192
for n in (5, 8192, 20001):
    words = torch.randint(-32768, 32768, (n,), generator=g).to(torch.int16)
    words[: n // 2] = -32768  # the largest sums
    assert int(triton_scan.checksum(words, 8191)) == int(receipt.checksum(words)), n
print("SAME")
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the compiled kernels are tested instead (test_rows.py, test_triton_scan.py)"
)
@pytest.mark.parametrize("code", [CODE, TABLES], ids=["rows", "tables"])
def test_the_kernels_give_what_torch_gives(code):
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=800)
    assert "SAME" in result.stdout, result.stderr[-2000:]
