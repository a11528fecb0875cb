# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: each fault of a machine is one finding with its remedy, and wrong numbers are not called ok."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.quantization.formats import FP8, INT8
from flashrl_verl.tools.check import arithmetic, machine

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def only(findings):
    [finding] = findings
    return finding


@pytest.mark.parametrize("gpus, free, level", [(0, 4 << 30, "ok"), (0, 64 << 20, "warning"), (8, 64 << 20, "error")])
def test_shared_memory_that_is_too_small_has_the_remedy(tmp_path, monkeypatch, gpus, free, level):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(machine, "gpus", lambda: [["NVIDIA H200", "9.0", "580", "140000", "143771"]] * gpus)
    found = only(machine.check_shared_memory(tmp_path))
    assert found.level == level and (level == "ok" or "--shm-size" in found.remedy)


def test_a_gpu_that_another_program_uses_is_a_warning_and_one_that_shares_the_hosts_memory_is_not(monkeypatch):
    said = "NVIDIA H100 80GB HBM3, 9.0, 580.65, 20000, 81559\nNVIDIA GH200, 9.0, 580.65, [N/A], [N/A]\n"
    monkeypatch.setattr(machine.subprocess, "run", lambda *words, **options: SimpleNamespace(stdout=said))
    _, used, shared = machine.check_memory()
    assert used.level == "warning" and "capability 9.0, driver 580.65, 20000 of 81559 MiB" in used.text
    assert shared.level == "ok" and "gpu_memory_utilization" in used.remedy


# ---- kernels ----


@pytest.mark.parametrize("fmt", [INT8, FP8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("factor", [1.0, 1.12, float("nan")])
def test_a_product_with_one_wrong_scale_or_nan_is_an_error(monkeypatch, fmt, factor):
    multiply = arithmetic.linear_kernel(fmt)

    def wrongly(*words):
        output = multiply(*words)
        output[:, 7] *= factor
        return output

    monkeypatch.setattr(arithmetic, "linear_kernel", lambda fmt: wrongly)
    found = only(arithmetic.check_format(fmt, [HERE]))
    assert found.level == ("ok" if factor == 1.0 else "error") and "from float64" in found.text


@pytest.mark.gpu
def test_attention_of_this_gpu_is_right_and_a_wrong_one_is_found(monkeypatch):
    from flashrl_verl.attention import kernels as attention

    assert only(arithmetic.check_attention([HERE])).level == "ok"
    write = attention.write

    def wrongly(key, value, cache, slots):
        value[:, 1] *= 1.02
        write(key, value, cache, slots)

    monkeypatch.setattr(attention, "write", wrongly)
    assert only(arithmetic.check_attention([HERE])).level == "error"
