# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan` against every rollout that was measured: memory, steps by part, prompts, ratios."""

import statistics
from pathlib import Path

import pytest
from result_pages import RESULTS

from flashrl_verl.bench import rollout as bench
from flashrl_verl.bench import rollout_report
from flashrl_verl.bench.arms import Arm
from flashrl_verl.bench.shapes import load_config
from flashrl_verl.config import Precision
from flashrl_verl.plan import gpus
from flashrl_verl.plan.memory import Choice
from flashrl_verl.plan.shape import shape_of
from flashrl_verl.plan.step import Clock

FILES = sorted(RESULTS.glob("[rt]*/*.jsonl"))
WITH_ROOM = [*(f for f in FILES if "gib" not in f.stem and "80gb" not in f.stem), RESULTS / "rollout/inductor/custom-op.jsonl"]
"""Measured with memory for all sequences at a time, so that a decode step has one size."""


def measured_and_planned(file: Path):
    """Timing of each arm and work, the clock of the plan, and its step in the middle of the response."""
    config, report = bench.measured(file)
    shape = shape_of(load_config(config.model))
    for arm in config.arms:
        clock = Clock(shape=shape, choice=Choice(precision=arm.precision, kv_cache=arm.kv_cache), gpu=gpus.find("h200"))
        for work in config.works:
            timing = report.timing(arm, work)
            assert report.of(arm)[0].memory["kv_tokens"] >= work.sequences * (work.prompt + work.response)
            yield timing, clock, clock.decode(work.sequences, work.prompt + work.response / 2)


def test_the_plan_is_within_1_percent_of_every_measured_kv_cache_and_within_20_of_every_ratio():
    for file in sorted(RESULTS.glob("[rt]*/*.jsonl")):
        config, report = bench.measured(file)
        for row in rollout_report.memory_rows(config, report):
            assert float(row[-1]) == pytest.approx(1, abs=0.01), row
        for _, _, _, whole, whole_planned, _, decode, decode_planned, *_ in rollout_report.speed_rows(config, report):
            if whole == whole_planned == "-":
                assert report.of(Arm(precision=Precision.BF16)) == []  # nothing there to be a multiple of
                continue
            assert float(whole_planned) == pytest.approx(float(whole), rel=0.2)
            assert float(decode_planned) == pytest.approx(float(decode), rel=0.2)


@pytest.mark.parametrize("file", WITH_ROOM, ids=lambda file: file.stem)
def test_steps_are_planned_within_10_percent_and_prompts_within_5(file):
    for timing, clock, step in measured_and_planned(file):
        sequences, prompt, response = timing.work
        measured = statistics.median(bench.decode_seconds(timing)) / (response - 1)
        assert step.total == pytest.approx(measured, rel=0.1), (clock.choice, timing.work)
        planned = clock.prefill(sequences * prompt, prompt, sequences)
        assert planned == pytest.approx(statistics.median(timing.prefill_seconds), rel=0.05), (clock.choice, timing.work)


@pytest.mark.parametrize("file", [f for f in WITH_ROOM if f.parent.name != "throughput"], ids=lambda file: file.stem)
def test_the_parts_of_profiled_steps_are_planned_within_6_percent(file):
    for timing, clock, step in measured_and_planned(file):
        if timing.profile is None:
            assert file.stem == "qwen2.5-32b"  # measured without
            continue
        milliseconds = timing.profile["milliseconds"]
        for part, planned in (("linear layers", step.linear), ("attention", step.attention)):
            assert 1e3 * planned == pytest.approx(milliseconds[part], rel=0.06), (clock.choice, timing.work, part)
