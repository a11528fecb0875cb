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
from flashrl_verl.quantization import numerics, triton_blocks
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
        triton_blocks.quantize_blocks_kernel[tuple(scales.shape)](
            weight, codes, scales, flag, *weight.stride(), *codes.stride(), *scales.stride(), FORMAT.code_max, True, B)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernel is tested instead (test_blocks.py)")
def test_the_kernel_gives_what_torch_gives():
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    result = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=800)
    assert "SAME" in result.stdout, result.stderr[-2000:]
