# SPDX-License-Identifier: Apache-2.0
"""The Triton block kernel in Triton's interpreter, where there is no GPU: the blocks of ``numerics``.

As in ``test_triton_rows.py``: the interpreter's FMA rounds twice, so blocks are divided; its conversion to E4M3 (Triton 3.6)
neither rounds half to even nor knows subnormals, so quotients are stored in float32 and rounded by torch. The compiled kernel's
quotient by FMAs and its rounding are in ``test_blocks.py``.
"""

import os
import subprocess
import sys

import pytest
import torch

CODE = """
import torch
import triton.language as tl
from flashrl_verl.quantization import kernels, numerics, triton_blocks
from flashrl_verl.quantization.formats.fp8_block import FORMAT

triton_blocks._MOST = tl.constexpr(0.0)
B = FORMAT.block
for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
    wide = torch.randn(2 * B, 5 * B, generator=torch.Generator().manual_seed(seed)).mul(0.02).to(dtype)
    wide[:B, B : 2 * B] = 0
    wide[0, 0] = -0.0
    weight = wide[:, : 3 * B]  # a view: rows lie 5 blocks apart
    store = torch.zeros(2 * B, 6 * B)
    codes, scales = store[:, B : 4 * B], torch.zeros(2, 9)[:, 2:8:2]
    flag = torch.zeros(1, dtype=torch.int32)
    expected, expected_scales = numerics.quantize(weight, FORMAT)
    for bad in (None, float("nan"), float("inf")):
        if bad is not None:
            weight[B + 9, 2 * B + 77] = bad
        kernels.launch_blocks(wide, codes, scales, FORMAT, 0, flag, rows=2 * B)
        good = torch.ones(2, 3, dtype=torch.bool)
        if bad is not None:
            good[1, 2] = False
            assert not scales[1, 2].isfinite()
        assert flag.item() == (bad is not None), (dtype, bad)
        assert torch.equal(scales[good], expected_scales[good]), (dtype, bad)
        same = numerics.as_bytes(codes.clamp(-448, 448).to(FORMAT.dtype)) == numerics.as_bytes(expected)
        same = same.view(2, B, 3, B).all(1).all(-1)
        assert same[good].all(), (dtype, bad, same)
    assert not store[:, :B].any() and not store[:, 4 * B :].any()
print("SAME")
"""

TABLES = """
import torch
import triton.language as tl
from flashrl_verl.quantization import kernels, numerics, row_table, triton_blocks
from flashrl_verl.quantization.formats.fp8_block import FORMAT
from flashrl_verl.quantization.row_table import RowJob, RowTable

triton_blocks._MOST = tl.constexpr(0.0)
row_table.require_fit = lambda *_: None  # it would refuse codes in float32
B = FORMAT.block
g = torch.Generator().manual_seed(0)
for dtype, columns, first, width, gaps in (
    (torch.bfloat16, 3 * B, 0, 3 * B, (0, 0, 0)),
    (torch.float32, 3 * B, B, 2 * B, (0, B, 16)),
    (torch.bfloat16, 2 * B, 0, B, (0, 3, 0)),
):
    bucket = torch.randn(8 * B * columns + 512, generator=g).to(dtype)
    parts, at = [], 0
    for rows, gap in zip((2 * B, B, 3 * B), gaps):
        at += gap
        parts.append(bucket[at : at + rows * columns].view(rows, columns))
        at += rows * columns
    codes, scales = torch.zeros(9 * B, width), torch.zeros(9, width // B)
    starts = (4, 0, 6)  # in other order than the bucket's
    jobs = []
    for part, start in zip(parts, starts):
        count = len(part) // B
        jobs.append(RowJob(part, codes[start * B : (start + count) * B], scales[start : start + count], FORMAT, first))
    groups = {}
    for job in jobs:
        groups.setdefault(job.geometry(), []).append(job)
    tables = [(group[0], RowTable(group)) for group in groups.values()]
    flag = torch.zeros(1, dtype=torch.int32)
    for step in range(2):
        for job, table in tables:
            table.launch(job.weight, flag)
        for job in jobs:
            expected, expected_scales = numerics.quantize(job.weight[:, first : first + width], FORMAT)
            found = job.codes.clamp(-448, 448).to(FORMAT.dtype)
            assert torch.equal(numerics.as_bytes(found), numerics.as_bytes(expected)), (dtype, columns, step)
            assert torch.equal(job.scales, expected_scales), (dtype, columns, step)
        assert not codes[B : 4 * B].any() and not scales[1:4].any() and not flag.item()
        bucket.mul_(torch.randn(bucket.shape, generator=g).to(dtype))
    parts[2][3 * B - 1, first] = float("inf")
    for job, table in tables:
        table.launch(job.weight, flag)
    assert flag.item() == 1
print("SAME")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernel is tested instead (test_blocks.py)")
@pytest.mark.parametrize("code", [CODE, TABLES], ids=["blocks", "tables"])
def test_the_kernel_gives_what_torch_gives(code):
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=800)
    assert "SAME" in result.stdout, result.stderr[-2000:]
