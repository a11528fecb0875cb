# SPDX-License-Identifier: Apache-2.0
"""Figures and words of docs/results/throughput_again.md, and where else they are quoted, are those of the raw data."""

import statistics
from collections import defaultdict

import pytest
from result_pages import RESULTS, drawn, page, tables

from flashrl_verl.bench import rollout as bench
from flashrl_verl.bench import rollout_figure

LITTLE = tuple(f"throughput/qwen2.5-32b-71gib-{which}-arms.jsonl" for which in ("two", "three"))
"""INT8 is in both: that beside BF16 counts as the first measurement."""
PAIRS = {
    "qwen2.5-32b": (("rollout/qwen2.5-32b-four-arms.jsonl",), "throughput/again/qwen2.5-32b.jsonl"),
    "qwen2.5-14b": (("throughput/qwen2.5-14b.jsonl",), "throughput/again/qwen2.5-14b.jsonl"),
    "qwen2.5-7b": (("throughput/qwen2.5-7b.jsonl",), "throughput/again/qwen2.5-7b.jsonl"),
    "qwen2.5-32b, 71 GiB": (LITTLE, "throughput/again/qwen2.5-32b-71gib.jsonl"),
}
"""The first measurement, in one file or two, and the second one."""
KV = "int8 + int8_per_token_head KV"
WORDS = " ".join(page("throughput_again.md").split())
ROWS = tables("throughput_again.md")[0][1:]


@pytest.fixture(scope="module")
def both():
    """Timings of the first measurement and the second, by place, arm and sequences."""
    found = {}
    for place, (firsts, second) in PAIRS.items():
        before = [bench.measured(RESULTS / file)[1] for file in firsts]
        config, again = bench.measured(RESULTS / second)
        for arm in config.arms:
            for work in config.works:
                first = next(timing for report in before if (timing := report.timing(arm, work)) is not None)
                found[place, str(arm), work.sequences] = first, again.timing(arm, work)
    return found


@pytest.fixture(scope="module")
def steady(both):
    """All but the work whose repeats differ most."""
    return {at: pair for at, pair in both.items() if (at[0], at[2]) != ("qwen2.5-7b", 256)}


@pytest.fixture(scope="module")
def unsteady(both, steady):
    return {at: pair for at, pair in both.items() if at not in steady}


def parts(timing) -> dict[str, float]:
    """Median seconds of whole rollouts, of prompts with one token each, and what is left."""
    whole, prompts = statistics.median(timing.seconds), statistics.median(timing.prefill_seconds)
    return {"whole": whole, "prompts": prompts, "decoding": whole - prompts}


def apart(pairs) -> dict[str, str]:
    """How far medians of the first are from the second, at most, in percent."""
    return {
        part: f"{100 * max(abs(parts(first)[part] / parts(again)[part] - 1) for first, again in pairs.values()):.1f} %"
        for part in ("whole", "prompts", "decoding")
    }


def singles(pairs) -> str:
    found = [max(max(a.seconds) / min(b.seconds), max(b.seconds) / min(a.seconds)) for a, b in pairs.values()]
    return f"{100 * (max(found) - 1):.1f} %"


def test_the_table_has_both_measurements():
    expected = []
    for firsts, second in PAIRS.values():
        before = {}
        for row in (row for file in firsts for row in rollout_figure.rows(rollout_figure.bars(RESULTS / file))):
            before.setdefault((row[3], row[4]), row)
        for row in rollout_figure.rows(rollout_figure.bars(RESULTS / second)):
            speed, whole, decoding = zip(before[row[3], row[4]][5:8], row[5:8], strict=True)
            expected.append([row[0], row[2], row[3], row[4], *speed, *whole, *decoding])
    assert expected == ROWS and len(ROWS) == 28


def test_how_far_they_are_apart_is_in_words(steady, unsteady):
    percent = apart(steady)
    assert f"within {percent['whole']} of the first, 7B's short sequences within {apart(unsteady)['whole']}" in WORDS
    said = "Medians of whole rollouts are within {whole}, of prompts within {prompts}, of decoding within {decoding}, where"
    assert said.format(**percent) in WORDS
    assert f"Single rollouts of the same work and arm are up to {singles(steady)} apart." in WORDS


def test_what_is_unsteady_is_in_words(steady, unsteady):
    ranges = [[max(timing.seconds) / min(timing.seconds) - 1 for timing in pair] for pair in unsteady.values()]
    first, again = (max(of) for of in zip(*ranges, strict=True))
    assert f"two repeats of one engine differ by up to {100 * again:.0f} % here, {100 * first:.0f} % the first time" in WORDS
    elsewhere = max(max(timing.seconds) / min(timing.seconds) - 1 for pair in steady.values() for timing in pair)
    assert f"elsewhere by {100 * elsewhere:.1f} % at most" in WORDS
    said = "medians of whole rollouts by up to {whole}, of prompts {prompts}, of decoding {decoding}, single rollouts {single}"
    assert said.format(**apart(unsteady), single=singles(unsteady)) in WORDS
    overlap = {at[1]: min(a.seconds) <= max(b.seconds) and min(b.seconds) <= max(a.seconds) for at, (a, b) in unsteady.items()}
    assert overlap == {"bf16": True, "int8": False, "fp8": True, KV: True}
    assert "Their ranges overlap with the first ones but for INT8's" in WORDS
    steps = [1e3 * parts(b)["decoding"] / 383 for _, b in unsteady.values()]
    assert f"a step takes {min(steps):.0f} to {max(steps):.0f} ms" in WORDS


def test_how_far_the_other_first_measurements_are_is_in_words():
    def away(first: str, second: str, arm: str, sequences: int) -> float:
        (config, before), (_, again) = (bench.measured(RESULTS / file) for file in (first, second))
        (arm,) = [of for of in config.arms if str(of) == arm]
        (work,) = [of for of in config.works if of.sequences == sequences]
        return 100 * (parts(before.timing(arm, work))["whole"] / parts(again.timing(arm, work))["whole"] - 1)

    two = "rollout/qwen2.5-32b-two-arms.jsonl", PAIRS["qwen2.5-32b"][1]
    long = [away(*two, arm, 28) for arm in ("bf16", "int8")]
    said = "From the *two-arms* measurement of 32B's long prompts with 126 GiB BF16 is {:.1f} % away and INT8 {:.1f} %,"
    assert said.format(*long) in WORDS
    three = [away(LITTLE[1], PAIRS["qwen2.5-32b, 71 GiB"][1], "int8", sequences) for sequences in (256, 28)]
    assert "from the *three-arms* one with 71 GiB INT8 is {:.1f} and {:.1f} %.".format(*three) in WORDS


def test_how_far_ratios_are_apart_is_in_words(both):
    moved = {"steady": ([], []), "unsteady": ([], [])}
    for place, (firsts, second) in PAIRS.items():
        again = rollout_figure.bars(RESULTS / second)
        first = rollout_figure.bars(RESULTS / firsts[0])
        for bar in again:
            for before in first:
                if (before.work, before.arm) == (bar.work, bar.arm):
                    unsteady = (place, bar.work.sequences) == ("qwen2.5-7b", 256)
                    whole, decoding = moved["unsteady" if unsteady else "steady"]
                    whole.append(rollout_figure.speed_up(bar, again) - rollout_figure.speed_up(before, first))
                    one, other = (
                        rollout_figure.base_of(of, among).decode_seconds / of.decode_seconds
                        for of, among in ((bar, again), (before, first))
                    )
                    decoding.append(one - other)
    bounds = [f"{-min(of):.2f} lower to {max(of):.2f} higher" for kind in moved.values() for of in kind]
    assert f"Ratios to BF16 are {bounds[0]}, those of decoding {bounds[1]}; with 7B's short sequences" in WORDS
    assert f"with 7B's short sequences {bounds[2]} and {bounds[3]}." in WORDS
    short = {row[3]: row for row in ROWS if row[:3] == ["qwen2.5-32b", "126", "256 x (256 -> 384)"]}
    assert "INT8 is {7} times as fast as BF16 with 32B's short sequences, for {6} times".format(*short["int8"]) in WORDS
    faster = {
        arm: parts(first)["whole"] / parts(again)["whole"] - 1
        for (place, arm, sequences), (first, again) in both.items()
        if (place, sequences) == ("qwen2.5-32b", 256)
    }
    assert f"BF16 was {100 * faster['bf16']:.1f} % faster, INT8 {-100 * faster['int8']:.1f} % slower." in WORDS


def test_what_71_gib_give_side_by_side_is_in_words():
    ratios = {(row[3], row[2][:3]): row[7] for row in ROWS if row[1] == "71"}
    pairs = [ratios[arm, work] for arm in ("int8", "fp8", KV) for work in ("256", "28 ")]
    said = (
        "INT8 is {} times as fast as BF16 with short sequences and {} times with long prompts, FP8 {} and {} times, "
        "INT8 with an INT8 KV cache {} and {} times."
    )
    assert said.format(*pairs) in WORDS
    assert "FP8 {} and {} times, INT8 with an INT8 KV cache {} and {} times".format(*pairs[2:]) in throughput_words()


def throughput_words() -> str:
    return " ".join(page("throughput.md").split())


def test_how_far_two_machines_differ_is_in_words():
    """Of 32B with the whole memory, measured up to five times: rollout.md says it, and two pages quote it."""
    found = defaultdict(list)
    for file in sorted((RESULTS / "rollout").rglob("*.jsonl")):
        config, report = bench.measured(file)
        for arm in config.arms:
            for work in config.works:
                found[arm, work].append(parts(report.timing(arm, work)))
    differ = [
        100 * max(max(of[part] for of in times) / min(of[part] for of in times) - 1 for times in found.values())
        for part in ("decoding", "prompts")
    ]
    said = "differ{} by up to {:.1f} % in decoding and {:.1f} % in prompts"
    assert said.format("s", *differ) in " ".join(page("rollout.md").split())
    assert said.format("", *differ) in throughput_words()
    assert "two machines differ by up to {1:.1f} % in prompts and {0:.1f} % in decoding".format(*differ) in WORDS


def test_one_engine_had_the_gpu_at_a_time_and_as_many_tokens_as_before():
    for firsts, second in PAIRS.values():
        before = {result.arm: result for file in firsts for result in bench.measured(RESULTS / file)[1].results}
        again = bench.measured(RESULTS / second)[1]
        assert {result.parallel for result in again.results} == {1}
        assert again.environment["date"] == "2026-11-23"
        for result in again.results:
            assert result.answer.memory["kv_tokens"] == before[result.arm].answer.memory["kv_tokens"]
    files = [file for firsts, _ in PAIRS.values() for file in firsts]
    together = {file: {result.parallel for result in bench.measured(RESULTS / file)[1].results} for file in files}
    assert together.pop(LITTLE[1]) == {4} and set(map(tuple, together.values())) == {(2,)}
    assert '"three-arms" four engines on four GPUs' in WORDS and "2026-11-23, one run in seven pieces" in WORDS


def test_what_is_quoted_elsewhere_is_that_of_the_runs():
    ahead = {
        (row[0], row[1], row[2][:3]): 100 * (float(row[7]) / float(fp8[7]) - 1)
        for row, fp8 in zip(ROWS, ROWS[1:], strict=False)
        if (row[3], fp8[3]) == ("int8", "fp8")
    }
    noisy = ahead.pop(("qwen2.5-7b", "126", "256"))
    said = f"[again](throughput_again.md) {min(ahead.values()):.0f} to {max(ahead.values()):.0f} %, and {noisy:.0f} % with 7B's"
    assert said in throughput_words()
    (kv,) = [row[7] for row in ROWS if (row[0], row[2][:3], row[3]) == ("qwen2.5-7b", "256", KV)]
    assert f"every size ({kv} with 7B's short sequences [again](throughput_again.md))" in throughput_words()
    short, long = (row[7] for row in ROWS if (row[1], row[3]) == ("71", KV))
    said = f"gain 2.61 x with 71 GiB, with an INT8 KV cache too {long} x (short ones {short} x);"
    assert said in " ".join((RESULTS.parents[1] / "README.md").read_text().split())


def test_the_pictures_are_of_these_measurements(tmp_path):
    for name, places in (("throughput", ("qwen2.5-32b", "qwen2.5-14b")), ("more", ("qwen2.5-7b", "qwen2.5-32b, 71 GiB"))):
        files = [file for place in places for file in (PAIRS[place][0][0], PAIRS[place][1])]
        rollout_figure.write([bar for file in files for bar in rollout_figure.bars(RESULTS / file)], tmp_path / "again.png")
        assert drawn(RESULTS / "throughput" / "again" / f"{name}.png") == drawn(tmp_path / "again.png")
