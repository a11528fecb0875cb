# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan` against every rollout that was measured: memory, steps by part, prompts, ratios."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from result_pages import RESULTS, page

from benchmarks import rollout as bench
from benchmarks import rollout_report
from benchmarks.rollout_engine import Timing
from flashrl_verl.settings import Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Choice
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.step import HOST_S, Clock, StepTime

AGAIN = sorted(RESULTS.glob("throughput/again/*.jsonl"))
FILES = [*sorted(RESULTS.glob("[rt]*/*.jsonl")), RESULTS / "rollout" / "inductor" / "custom-op.jsonl", *AGAIN]
WITH_PROFILE = [file for file in FILES if "throughput" not in file.parts and "two-arms" not in file.stem]
PAGE = " ".join(page("../precision_and_cap.md").split())


def with_room(file: Path) -> Iterator[tuple[Timing, Clock, StepTime]]:
    """Of each arm and work whose sequences fit at a time, so that a decode step has one size: its timing, the plan's
    clock, and the plan's step in the middle of the response."""
    config, report = bench.measured(file)
    shape = shape_of(load_config(config.model))
    for arm in config.arms:
        clock = Clock(shape=shape, choice=Choice(precision=arm.precision, kv_cache=arm.kv_cache), gpu=gpus.find("h200"))
        for work in config.works:
            if report.of(arm)[0].memory["kv_tokens"] >= work.sequences * (work.prompt + work.response):
                yield report.timing(arm, work), clock, clock.decode(work.sequences, work.prompt + work.response / 2)


NOISY = [RESULTS / "throughput" / name for name in ("qwen2.5-7b-71gib.jsonl", "again/qwen2.5-7b.jsonl")]
"""Two repeats of one of the engines differ by 12 and 17 %."""
LITTLE = [
    RESULTS / "throughput" / name for name in ("qwen2.5-32b-71gib-two-arms.jsonl", "again/qwen2.5-32b-71gib.jsonl")
]
"""BF16's KV cache is the smallest here, 6.3 GiB: three sequences of 8192 tokens at a time."""


def named(file: Path) -> str:
    return str(file.relative_to(RESULTS).with_suffix(""))


@pytest.mark.parametrize("file", FILES, ids=named)
def test_the_plan_is_within_1_percent_of_every_measured_kv_cache(file):
    for row in rollout_report.memory_rows(*bench.measured(file)):
        if file in LITTLE and row[0] == "bf16":
            assert (
                row[-1] == "1.011" and "KV caches are within 1 %, BF16's of 6.3 GiB 1.1 % larger than planned" in PAGE
            )
            continue
        assert float(row[-1]) == pytest.approx(1, abs=0.01), row


def ratios(file: Path) -> tuple[list[float], list[float]]:
    """Planned over measured, of what has BF16 beside it: whole rollouts, and decoding."""
    config, report = bench.measured(file)
    wholes, decodes = [], []
    for _, _, _, whole, whole_planned, _, decode, decode_planned, *_ in rollout_report.speed_rows(config, report):
        if whole == whole_planned == "-":
            assert report.of(Arm(precision=Precision.BF16)) == []  # nothing there to be a multiple of
        else:
            wholes.append(float(whole_planned) / float(whole))
            decodes.append(float(decode_planned) / float(decode))
    return wholes, decodes


def percent(low: float, high: float) -> tuple[int, int]:
    return round(-100 * low), round(100 * high)


def test_ratios_are_planned_within_8_percent_but_where_repeats_differ():
    noisy, rest = [], [ratio for file in FILES if file not in (*NOISY, *LITTLE) for ratio in sum(ratios(file), [])]
    for of in (of for file in NOISY for of in ratios(file)):  # of each arm with short prompts, then with long
        noisy += of[: len(of) // 2]
        rest += of[len(of) // 2 :]
    of_int8 = []
    for file in LITTLE:  # of each arm, BF16 first and INT8 second: with short prompts, then with long
        wholes, decodes = ratios(file)
        of_int8.append(decodes.pop(len(decodes) // 2 + 1))
        rest += [*wholes, *decodes]
    assert 1.08 < min(of_int8) and max(of_int8) < 1.12
    high = (
        "but {:.0f} and {:.0f} % high in two measurements for decoding alone of INT8 where BF16 holds three of 28 long "
        "prompts"
    )
    assert high.format(*(100 * (ratio - 1) for ratio in of_int8)) in PAGE
    assert len(noisy) == 16 and len(rest) > 115
    assert all(ratio == pytest.approx(1, abs=0.08) for ratio in rest) and max(noisy) < 1.15 and min(noisy) > 0.92
    assert (
        f"ratios up to {100 * (max(noisy) - 1):.0f} % high" in PAGE
        and "ratios to BF16 (with the KV cache that was measured) within 8 %, with little memory too" in PAGE
    )
    repeats = []
    for config, report in map(bench.measured, NOISY):
        repeats += [report.timing(arm, config.works[0]).seconds for arm in config.arms]
    assert f"repeats of one engine differ by up to {100 * max(max(s) / min(s) - 1 for s in repeats):.0f} %" in PAGE


def test_steps_are_planned_within_7_percent_but_where_repeats_differ_and_prompts_within_8():
    errors, noisy, prompts = [], [], []
    for file in FILES:
        for timing, clock, step in with_room(file):
            sequences, prompt, response = timing.work
            measured = statistics.median(bench.decode_seconds(timing)) / (response - 1)
            (noisy if file in NOISY and sequences == 256 else errors).append(step.total / measured - 1)
            planned = clock.prefill(sequences * prompt, prompt, sequences)
            prompts.append(planned / statistics.median(timing.prefill_seconds) - 1)
    assert len(errors) > 45 and max(map(abs, errors)) < 0.07 and max(map(abs, prompts)) < 0.08
    assert "decode steps are within 7 % ({} % low to {} % high)".format(*percent(min(errors), max(errors))) in PAGE
    assert "prompts within 8 % ({} % low to {} % high)".format(*percent(min(prompts), max(prompts))) in PAGE
    assert f"steps are up to {-100 * min(noisy):.0f} % low" in PAGE
    assert len(noisy) == 8 and min(noisy) > -0.145 and max(noisy) < 0.07


@pytest.mark.parametrize("file", WITH_PROFILE, ids=named)
def test_the_parts_of_profiled_steps_are_planned(file):
    """Products and attention within 6 %, quantization and the rest, of a tenth of a step or less, within 17 and 15
    %."""
    found = list(with_room(file))
    assert found
    for timing, clock, step in found:
        parts = dict(timing.profile["milliseconds"])
        for name, planned, within in (
            ("linear layers", step.linear, 0.06),
            ("attention", step.attention, 0.06),
            ("activation quantization", step.quantize, 0.17),
        ):
            assert 1e3 * planned == pytest.approx(parts.pop(name), rel=within), (clock.choice, timing.work, name)
        assert 1e3 * (step.rest - HOST_S) == pytest.approx(sum(parts.values()), rel=0.15), (clock.choice, timing.work)
