# SPDX-License-Identifier: Apache-2.0
"""Kernels of the INT8 KV cache against float64 by hand: compiled where there is a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "programs" / "attention_cases.py"


GPU_NAMES = (
    *("grouped", "seven share", "one head", "each its own", "sixteen share", "long pages"),
    *("blocks of a tile", "blocks of two tiles", "float16", "large", "small"),
    *("an empty row", "head of 128", "head of 256", "many", "not cut"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["check_pages", "check_decode", "check_read"])
@pytest.mark.parametrize("name", GPU_NAMES)
def test_compiled(name, check):
    import attention_cases

    getattr(attention_cases, check)({**attention_cases.CASES, **attention_cases.ON_GPU}[name], "cuda")


@pytest.mark.gpu
def test_every_case_is_run_compiled():
    import attention_cases

    assert {*attention_cases.CASES, *attention_cases.ON_GPU} == {*GPU_NAMES}


@pytest.mark.gpu
def test_what_is_not_finite_comes_out_compiled():
    import attention_cases

    attention_cases.check_what_is_not_finite("cuda")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested instead")
def test_interpreted():
    pytest.importorskip("triton", reason="the CPU environment leaves Triton out")
    env = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.stdout.endswith("SAME\n"), done.stdout[-1000:] + done.stderr[-3000:]
