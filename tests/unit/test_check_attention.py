# SPDX-License-Identifier: Apache-2.0
"""The look at our attention: what it says, and on a GPU the faults that it finds."""

import pytest

from flashrl_verl.tools.check import attention
from flashrl_verl.tools.check.devices import Gpu
from flashrl_verl.tools.check.findings import Verdict


def only(*capabilities: int):
    gpus = [Gpu(index=i, name=f"of {c}", capability=c, free_bytes=1, total_bytes=1) for i, c in enumerate(capabilities)]
    [finding] = attention.check_attention(gpus)
    assert finding.name == "INT8 attention"
    return finding


def test_without_a_gpu_or_on_an_old_one_it_is_not_called_ok():
    assert only().verdict is Verdict.SKIPPED
    old = only(90, 75)
    assert old.verdict is Verdict.SKIPPED and "needs 8.0, here is of 75 (7.5)" in old.text


@pytest.mark.parametrize("error, verdict", [(1.7e-3, Verdict.OK), (6e-3, Verdict.FAIL), (float("nan"), Verdict.FAIL)])
def test_what_is_too_far_or_not_finite_on_one_gpu_of_several_fails(monkeypatch, error, verdict):
    def one_is_so(*case):
        return error if case[-1].index == 1 else 1e-3

    monkeypatch.setattr(attention, "largest_error", one_is_so)
    finding = only(90, 90)
    assert finding.verdict is verdict
    if verdict is Verdict.FAIL:
        assert "on GPU 1" in finding.text and "flashrl.kv_cache=auto" in finding.remedy
    else:
        assert "1.7e-03 from float64" in finding.text and "2 GPU(s)" in finding.text


@pytest.mark.gpu
def test_faults_are_found_and_the_kernels_of_this_gpu_have_none():
    import check_attention_cases

    from flashrl_verl.tools.check.devices import cuda_gpus

    check_attention_cases.check()
    [finding] = attention.check_attention(cuda_gpus())
    assert finding.verdict is Verdict.OK, finding
