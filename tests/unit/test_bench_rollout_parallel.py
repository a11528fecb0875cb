# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench rollout --parallel`: engines on GPUs of their own, and results in the order of arms and rounds."""

from dataclasses import asdict

import pytest
import torch
from rollout_results import answer, config

from benchmarks import rollout
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.engines.visible_gpus import gpu_groups, visible_gpus


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [("", 2, ("0", "1")), ("3, GPU-5c", 2, ("3", "GPU-5c")), ("-1", 0, ()), ("4,5,99,6", 2, ("4", "5"))],
)
def test_visible_gpus_are_those_that_exist(named, count, seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible_gpus() == seen


@pytest.mark.parametrize(("count", "fits"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_an_engine_of_more_gpus_than_are_visible_is_refused(count, fits, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert gpu_groups(1, fits) == (None,)
    for engines in (1, 2):
        with pytest.raises(
            ConfigError, match=f"4 needs as many GPUs, and {count} are visible.*--tensor-parallel {fits}$"
        ):
            gpu_groups(engines, 4)


def test_engines_at_a_time_have_gpus_of_their_own_and_results_their_order(tmp_path, monkeypatch):
    """Four places of two GPUs; engines end in the opposite order."""
    seen = []

    def answers(module, questions, folder, places):
        seen.append(places)
        for question in reversed(list(questions)):
            yield question.key, asdict(answer(question.key[1].precision, [5.0], [1.0]))

    monkeypatch.setattr(rollout.engine_process, "answers", answers)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    report = rollout.run(config(tmp_path, parallel=4, tensor_parallel=2))
    assert seen == [("0,1", "2,3", "4,5", "6,7")]
    assert [(r.round, r.arm, r.parallel) for r in report.results] == [
        (i, arm, 4) for i in (0, 1) for arm in ("bf16", "int8")
    ]
    assert rollout.load(tmp_path / rollout.RESULTS) == report
    with pytest.raises(
        ConfigError, match=r"--parallel 5 with 2 GPU\(s\) each needs 10, and 8 are visible.*--parallel 4"
    ):
        rollout.run(config(tmp_path / "more", parallel=5, tensor_parallel=2))


def test_an_engine_that_turns_out_to_run_on_another_device_is_refused_and_the_first_kept(tmp_path, monkeypatch):
    def answers(module, questions, folder, places):
        for question, device in zip(list(questions), ("NVIDIA H200", "NVIDIA A100"), strict=True):
            yield question.key, asdict(answer(question.key[1].precision, [5.0], [1.0], device))

    monkeypatch.setattr(rollout.engine_process, "answers", answers)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(FlashRLError, match="another device, NVIDIA H200; this is NVIDIA A100"):
        rollout.run(config(tmp_path, rounds=1, parallel=2))
    assert [result.arm for result in rollout.load(tmp_path / rollout.RESULTS).results] == ["bf16"]
