# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench rollout` of a precision whose speed `flashrl plan` does not know."""

from flashrl_verl.bench import rollout_report
from flashrl_verl.bench.arms import Arm
from flashrl_verl.bench.rollout import Report, Result, RolloutConfig
from flashrl_verl.bench.rollout_engine import Answer, Timing
from flashrl_verl.config import Precision
from flashrl_verl.plan.schedule import Work
from flashrl_verl.report.palette import OF_PRECISION

WORK = Work(sequences=10, prompt=100, response=51)
ARMS = tuple(Arm(precision=precision) for precision in (Precision.BF16, Precision.FP8_BLOCK))


def answer() -> Answer:
    return Answer(
        layers={},
        memory={"kv_tokens": 1000, "kv_bytes": 512000, "kv_dtype": "bfloat16", "weight_bytes": 2e9},
        weights={"tensors": 10, "zeros": 0.01, "std": 0.02},
        device={"device": "NVIDIA H200", "memory_bytes": None},
        timings=[Timing(work=[10, 100, 51], seconds=[6.0], prefill_seconds=[1.0])],
    )


def test_a_precision_of_unknown_speed_is_measured_and_not_planned(tmp_path):
    config = RolloutConfig(
        model="tiny", arms=ARMS, works=(WORK,), rounds=1, repeats=1, gpu_memory_utilization=0.9, tensor_parallel=1,
        max_num_seqs=64, max_num_batched_tokens=512, layers=None, seed=0, output=tmp_path,
    )  # fmt: skip
    results = [Result(round=0, arm=str(arm), answer=answer()) for arm in ARMS]
    report = Report(settings={}, environment={"device": "NVIDIA H200", "memory_bytes": None}, results=results)
    prediction = rollout_report.Prediction(config, report)
    row = rollout_report._row(report, prediction, ARMS[1], ARMS[0], WORK)
    assert row[1:3] == ["1.00", "-"] and prediction.kv_tokens(ARMS[1]) > 0
    assert "no speed of fp8_block" in " ".join(rollout_report.notes(config, report))


def test_every_precision_has_a_colour_of_its_own():
    assert set(OF_PRECISION) == set(Precision)
    assert len(set(OF_PRECISION.values())) == len(OF_PRECISION)
