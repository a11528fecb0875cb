# SPDX-License-Identifier: Apache-2.0
"""Figures and words of docs/results/throughput_again.md, and where else they are quoted, are those of the raw data."""

import statistics
from collections import defaultdict

import pytest
from result_pages import RESULTS, drawn, page, tables

from flashrl_verl.bench import rollout as bench
from flashrl_verl.bench import rollout_figure

PAIRS = {
    "qwen2.5-32b": ("rollout/qwen2.5-32b-four-arms.jsonl", "throughput/again/qwen2.5-32b.jsonl"),
    "qwen2.5-14b": ("throughput/qwen2.5-14b.jsonl", "throughput/again/qwen2.5-14b.jsonl"),
}
"""The first measurement and the second one, by model."""
WORDS = " ".join(page("throughput_again.md").split())
ROWS = tables("throughput_again.md")[0][1:]


@pytest.fixture(scope="module")
def both():
    """Timings of the first measurement and the second, by model, arm and work."""
    found = {}
    for model, files in PAIRS.items():
        (_, first), (config, again) = (bench.measured(RESULTS / file) for file in files)
        for arm in config.arms:
            for work in config.works:
                found[model, str(arm), work] = first.timing(arm, work), again.timing(arm, work)
    return found


def test_the_table_has_both_measurements():
    expected = []
    for files in PAIRS.values():
        first, again = (rollout_figure.rows(rollout_figure.bars(RESULTS / file)) for file in files)
        before = {(row[3], row[4]): row for row in first}
        for row in again:
            speed, whole, decoding = zip(before[row[3], row[4]][5:8], row[5:8], strict=True)
            expected.append([row[0], row[3], row[4], *speed, *whole, *decoding])
    assert expected == ROWS and len(ROWS) == 12


def parts(timing) -> dict[str, float]:
    """Median seconds of whole rollouts, of prompts with one token each, and what is left."""
    whole, prompts = statistics.median(timing.seconds), statistics.median(timing.prefill_seconds)
    return {"whole": whole, "prompts": prompts, "decoding": whole - prompts}


def test_how_far_they_are_apart_is_in_words(both):
    apart = {
        part: max(abs(parts(first)[part] / parts(again)[part] - 1) for first, again in both.values())
        for part in ("whole", "prompts", "decoding")
    }
    percent = {part: f"{100 * share:.1f} %" for part, share in apart.items()}
    assert f"medians are within {percent['whole']} of the first" in WORDS
    assert percent["whole"] == percent["prompts"]
    said = "Medians of whole rollouts and of prompts are within {whole}, of decoding within {decoding}, where"
    assert said.format(**percent) in WORDS
    single = max(max(max(x) / min(y), max(y) / min(x)) for x, y in ((a.seconds, b.seconds) for a, b in both.values()))
    assert f"Single rollouts of the same work and arm are up to {100 * (single - 1):.1f} % apart." in WORDS


def test_how_far_the_other_first_measurement_is_is_in_words():
    (_, first), (config, again) = (
        bench.measured(RESULTS / file) for file in ("rollout/qwen2.5-32b-two-arms.jsonl", PAIRS["qwen2.5-32b"][1])
    )
    (work,) = [work for work in config.works if work.sequences == 28]
    bf16, int8 = (
        100 * (parts(first.timing(arm, work))["whole"] / parts(again.timing(arm, work))["whole"] - 1) for arm in config.arms[:2]
    )
    said = f"From the *two-arms* measurement of 32B's long prompts BF16 is {bf16:.1f} % away and INT8 {int8:.1f} %."
    assert said in WORDS


def test_how_far_ratios_are_apart_is_in_words(both):
    moved, of_decoding = [], []
    for files in PAIRS.values():
        first, again = (rollout_figure.bars(RESULTS / file) for file in files)
        for bar in again:
            (before,) = [other for other in first if (other.work, other.arm) == (bar.work, bar.arm)]
            moved.append(rollout_figure.speed_up(bar, again) - rollout_figure.speed_up(before, first))
            ratios = (
                rollout_figure.base_of(one, among).decode_seconds / one.decode_seconds
                for one, among in ((bar, again), (before, first))
            )
            of_decoding.append(next(ratios) - next(ratios))
    bounds = [f"{-min(of):.2f} lower to {max(of):.2f} higher" for of in (moved, of_decoding)]
    assert f"Ratios to BF16 are {bounds[0]}, those of decoding {bounds[1]}:" in WORDS
    short = {row[2]: row for row in ROWS if row[:2] == ["qwen2.5-32b", "256 x (256 -> 384)"]}
    assert "INT8 is {6} times as fast as BF16 with 32B's short sequences, for {5} times".format(*short["int8"]) in WORDS
    faster = {}
    for (model, arm, work), (first, again) in both.items():
        if (model, work.sequences) == ("qwen2.5-32b", 256):
            faster[arm] = parts(first)["whole"] / parts(again)["whole"] - 1
    assert f"BF16 was {100 * faster['bf16']:.1f} % faster, INT8 {-100 * faster['int8']:.1f} % slower." in WORDS


def test_how_far_two_machines_differ_is_in_words():
    """Of 32B with the whole memory, measured up to five times: rollout.md says it, and two pages quote it."""
    found = defaultdict(list)
    for file in sorted((RESULTS / "rollout").rglob("*.jsonl")):
        config, report = bench.measured(file)
        for arm in config.arms:
            for work in config.works:
                found[arm, work].append(parts(report.timing(arm, work)))
    apart = [
        100 * max(max(of[part] for of in times) / min(of[part] for of in times) - 1 for times in found.values())
        for part in ("decoding", "prompts")
    ]
    said = "differ{} by up to {:.1f} % in decoding and {:.1f} % in prompts"
    assert said.format("s", *apart) in " ".join(page("rollout.md").split())
    assert said.format("", *apart) in " ".join(page("throughput.md").split())
    assert "two machines differ by up to {1:.1f} % in prompts and {0:.1f} % in decoding".format(*apart) in WORDS


def test_one_engine_had_the_gpu_at_a_time_and_as_many_tokens_as_before():
    for files in PAIRS.values():
        first, again = (bench.measured(RESULTS / file)[1] for file in files)
        before = {result.arm: result for result in first.results}
        assert {result.parallel for result in again.results} == {1}
        assert {result.parallel for result in first.results} == {2}
        for result in again.results:
            assert result.answer.memory["kv_tokens"] == before[result.arm].answer.memory["kv_tokens"]
    assert again.environment["date"] == "2026-11-23" and "2026-11-23, one run in three pieces" in WORDS


def test_what_is_quoted_elsewhere_is_that_of_the_runs():
    ahead = [
        float(int8[6]) / float(fp8[6]) - 1
        for int8, fp8 in zip(ROWS, ROWS[1:], strict=False)
        if (int8[2], fp8[2]) == ("int8", "fp8")
    ]
    assert [f"{100 * ratio:.0f}" for ratio in ahead] == ["6", "6"]
    assert "(32B [again](throughput_again.md), where it is 6 %)" in " ".join(page("throughput.md").split())


def test_the_picture_is_of_these_measurements(tmp_path):
    bars = [bar for files in PAIRS.values() for file in files for bar in rollout_figure.bars(RESULTS / file)]
    rollout_figure.write(bars, tmp_path / "again.png")
    assert drawn(RESULTS / "throughput" / "again" / "throughput.png") == drawn(tmp_path / "again.png")
