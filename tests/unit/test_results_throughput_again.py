# SPDX-License-Identifier: Apache-2.0
"""Figures and words of docs/results/throughput_again.md, and where else they are quoted, are those of the raw data."""

import statistics
from collections import defaultdict

import pytest
from result_pages import RESULTS, drawn, page, tables

from benchmarks import rollout as bench
from benchmarks import rollout_figure

TWO, THREE = (f"throughput/qwen2.5-32b-71gib-{which}-arms.jsonl" for which in ("two", "three"))
EARLIER = {
    "qwen2.5-32b": ("rollout/qwen2.5-32b-four-arms.jsonl", "rollout/qwen2.5-32b-two-arms.jsonl"),
    "qwen2.5-14b": ("throughput/qwen2.5-14b.jsonl",),
    "qwen2.5-7b": ("throughput/qwen2.5-7b.jsonl",),
    "qwen2.5-32b, 71 GiB": (TWO, THREE),
}
"""Measurements of the same works before; the first that has an arm is its first figure in the table."""
AGAIN = {
    place: f"throughput/again/{file}.jsonl"
    for place, file in zip(EARLIER, ("qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b", "qwen2.5-32b-71gib"), strict=True)
}
KV = "int8 + int8_per_token_head KV"
WORDS = " ".join(page("throughput_again.md").split())
THROUGHPUT = " ".join(page("throughput.md").split())
ROWS = tables("throughput_again.md")[0][1:]


@pytest.fixture(scope="module")
def pairs():
    """Timings of an earlier measurement and of this one, by place, arm, sequences and the earlier file."""
    found = {}
    for place, files in EARLIER.items():
        config, again = bench.measured(RESULTS / AGAIN[place])
        for file in files:
            before = bench.measured(RESULTS / file)[1]
            for arm in config.arms:
                for work in config.works:
                    if (timing := before.timing(arm, work)) is not None:
                        found[place, str(arm), work.sequences, file] = timing, again.timing(arm, work)
    return found


@pytest.fixture(scope="module")
def steady(pairs):
    """All but the work whose repeats differ most."""
    return {at: pair for at, pair in pairs.items() if (at[0], at[2]) != ("qwen2.5-7b", 256)}


@pytest.fixture(scope="module")
def unsteady(pairs, steady):
    return {at: pair for at, pair in pairs.items() if at not in steady}


def parts(timing) -> dict[str, float]:
    """Median seconds of whole rollouts, of prompts with one token each, and what is left."""
    whole, prompts = statistics.median(timing.seconds), statistics.median(timing.prefill_seconds)
    return {"whole": whole, "prompts": prompts, "decoding": whole - prompts}


def spread(*seconds: float) -> float:
    """By how much of the shortest the longest is longer, in percent."""
    return 100 * (max(seconds) / min(seconds) - 1)


def apart(of) -> dict[str, str]:
    """How far medians of two measurements are apart at most, and single rollouts."""
    found = {
        part: max(spread(parts(first)[part], parts(again)[part]) for first, again in of.values())
        for part in ("whole", "prompts", "decoding")
    }
    found["single"] = max(spread(*first.seconds, *again.seconds) for first, again in of.values())
    return {part: f"{percent:.1f} %" for part, percent in found.items()}


def test_the_table_has_both_measurements():
    expected = []
    for place, files in EARLIER.items():
        before = {}
        for row in (row for file in files for row in rollout_figure.rows(rollout_figure.bars(RESULTS / file))):
            before.setdefault((row[3], row[4]), row)
        for row in rollout_figure.rows(rollout_figure.bars(RESULTS / AGAIN[place])):
            speed, whole, decoding = zip(before[row[3], row[4]][5:8], row[5:8], strict=True)
            expected.append([row[0], row[2], row[3], row[4], *speed, *whole, *decoding])
    assert expected == ROWS and len(ROWS) == 28


def test_how_far_they_are_apart_is_in_words(steady, unsteady):
    said = "medians are within {} of earlier ones, 7B's short sequences within {}"
    assert said.format(apart(steady)["whole"], apart(unsteady)["whole"]) in WORDS
    said = (
        "of whole rollouts are within {whole} of earlier ones, of prompts within {prompts}, of decoding within "
        "{decoding},"
    )
    assert said.format(**apart(steady)) in WORDS
    assert "Single rollouts of the same work and arm are up to {single} apart.".format(**apart(steady)) in WORDS
    farthest = max(steady, key=lambda at: spread(*(parts(timing)["whole"] for timing in steady[at])))
    assert farthest == ("qwen2.5-32b, 71 GiB", "int8", 256, THREE)
    rest = {at: pair for at, pair in steady.items() if at[3] != THREE}
    said = 'Farthest is INT8 of 32B with 71 GiB from "three-arms"; without that measurement medians are within {whole}.'
    assert said.format(**apart(rest)) in WORDS


def test_what_is_unsteady_is_in_words(steady, unsteady):
    first, again = (max(spread(*timing.seconds) for timing in of) for of in zip(*unsteady.values(), strict=True))
    config, with_71 = bench.measured(RESULTS / "throughput" / "qwen2.5-7b-71gib.jsonl")
    little = max(spread(*with_71.timing(arm, config.works[0]).seconds) for arm in config.arms)
    elsewhere = max(spread(*timing.seconds) for _, timing in steady.values())
    said = "two repeats of one engine differ by up to {:.0f} % (before, {:.0f} %, and {:.0f} % with 71 GiB),"
    assert f"{said.format(again, first, little)} of the other works here by {elsewhere:.1f} % at most" in WORDS
    prompts = max(spread(*timing.prefill_seconds) for pair in unsteady.values() for timing in pair)
    decoding = max(spread(*bench.decode_seconds(timing)) for pair in unsteady.values() for timing in pair)
    assert f"It is in decoding, which differs by up to {decoding:.0f} %, prompts by {prompts:.1f} %" in WORDS
    steps = [1e3 * parts(timing)["decoding"] / 191 for at, (_, timing) in steady.items() if at[0] == "qwen2.5-7b"]
    long = max(spread(*bench.decode_seconds(x)) for at, pair in steady.items() if at[0] == "qwen2.5-7b" for x in pair)
    said = (
        f"long prompts have steps of {min(steps):.0f} to {max(steps):.0f} ms, and their decoding repeats within "
        f"{long:.1f} %"
    )
    assert said in WORDS
    said = (
        "of whole rollouts are up to {whole} apart, of prompts {prompts}, of decoding {decoding}, single rollouts "
        "{single}."
    )
    assert said.format(**apart(unsteady)) in WORDS
    overlap = {
        at[1]: min(a.seconds) <= max(b.seconds) and min(b.seconds) <= max(a.seconds) for at, (a, b) in unsteady.items()
    }
    assert overlap == {"bf16": True, "int8": False, "fp8": True, KV: True}
    (int8,) = [parts(a)["whole"] / parts(b)["whole"] - 1 for at, (a, b) in unsteady.items() if at[1] == "int8"]
    assert f"Ranges overlap with the earlier ones but for INT8's, which is {100 * int8:.1f} % faster" in WORDS


def test_how_far_ratios_are_apart_is_in_words():
    moved = {"steady": ([], []), "unsteady": ([], [])}
    faster = {}
    for place, files in EARLIER.items():
        first, again = (rollout_figure.bars(RESULTS / file) for file in (files[0], AGAIN[place]))
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
                    ahead = statistics.median(before.seconds) / statistics.median(bar.seconds) - 1
                    faster[place, str(bar.arm), bar.work.sequences] = 100 * ahead
    bounds = [f"{-min(of):.2f} lower to {max(of):.2f} higher" for kind in moved.values() for of in kind]
    said = (
        f"To BF16 of the same measurement, beside those of the table's first ones: {bounds[0]}, of decoding "
        f"{bounds[1]};"
    )
    assert f"{said} with 7B's short sequences {bounds[2]} and {bounds[3]}." in WORDS
    short = {row[3]: row for row in ROWS if row[:3] == ["qwen2.5-32b", "126", "256 x (256 -> 384)"]}
    assert "INT8 is {7} times as fast as BF16 with 32B's short sequences, for {6} times".format(*short["int8"]) in WORDS
    bf16, int8 = (faster["qwen2.5-32b", arm, 256] for arm in ("bf16", "int8"))
    assert f"BF16 was {bf16:.1f} % faster, INT8 {-int8:.1f} % slower." in WORDS


def test_what_71_gib_give_is_in_words():
    ratios = {(row[3], row[2][:3]): row[7] for row in ROWS if row[1] == "71"}
    found = [ratios[arm, work] for arm in ("int8", "fp8", KV) for work in ("256", "28 ")]
    said = (
        "INT8 is {} times as fast as BF16 with short sequences and {} times with long prompts, FP8 {} and {} times, "
        "INT8 with an INT8 KV cache {} and {} times."
    )
    assert said.format(*found) in WORDS
    assert (
        "INT8 {} and {} times, FP8 {} and {} times, INT8 with an INT8 KV cache {} and {} times".format(*found)
        in THROUGHPUT
    )
    fit = [bar.fit for bar in rollout_figure.bars(RESULTS / AGAIN["qwen2.5-32b, 71 GiB"]) if str(bar.arm) == "bf16"]
    assert "BF16 has room for {} of the 256 short sequences at a time and {} of the 28 long ones".format(*fit) in WORDS


def test_how_far_two_machines_differ_is_in_words():
    """Of 32B with the whole memory, measured up to five times: rollout.md says it, and two pages quote it."""
    found = defaultdict(list)
    for file in sorted((RESULTS / "rollout").rglob("*.jsonl")):
        config, report = bench.measured(file)
        for arm in config.arms:
            for work in config.works:
                found[arm, work].append(parts(report.timing(arm, work)))
    differ = [max(spread(*(of[part] for of in times)) for times in found.values()) for part in ("decoding", "prompts")]
    said = "differ{} by up to {:.1f} % in decoding and {:.1f} % in prompts"
    assert said.format("s", *differ) in " ".join(page("rollout.md").split())
    assert said.format("", *differ) in THROUGHPUT
    assert "two machines differ by up to {1:.1f} % in prompts and {0:.1f} % in decoding (32B,".format(*differ) in WORDS


def test_one_engine_had_the_gpu_at_a_time_and_as_many_tokens_as_before():
    machines, packages = {}, {}
    for place, files in EARLIER.items():
        before = [result for file in files for result in bench.measured(RESULTS / file)[1].results]
        again = bench.measured(RESULTS / AGAIN[place])[1]
        assert {result.parallel for result in again.results} == {1}
        assert again.environment["date"] == "2026-11-23"
        (machines[place],) = {result.answer.device["machine"] for result in again.results}
        packages[place] = again.environment["package"]
        tokens = {result.arm: result.answer.memory["kv_tokens"] for result in again.results}
        assert [result.answer.memory["kv_tokens"] for result in before if result.arm in tokens] == [
            tokens[result.arm] for result in before if result.arm in tokens
        ]
    for known in (machines, packages):
        assert known["qwen2.5-32b"] == known["qwen2.5-14b"] != known["qwen2.5-7b"] == known["qwen2.5-32b, 71 GiB"]
    assert "2026-11-23, each engine once, on two machines with two versions of this package" in WORDS
    together = {
        file: {result.parallel for result in bench.measured(RESULTS / file)[1].results}
        for of in EARLIER.values()
        for file in of
    }
    assert together.pop(THREE) == {4} and '"three-arms" four engines on four GPUs' in WORDS
    assert (
        together.pop(EARLIER["qwen2.5-32b"][1]) == {1}
        and '"two-arms" with 126 GiB one engine, beside other programs' in WORDS
    )
    assert set(map(tuple, together.values())) == {(2,)}


def test_what_is_quoted_elsewhere_is_that_of_the_runs():
    bars = {
        (place, str(bar.arm), bar.work.sequences): bar
        for place, file in AGAIN.items()
        for bar in rollout_figure.bars(RESULTS / file)
    }
    medians = {at: statistics.median(bar.seconds) for at, bar in bars.items()}
    ahead = {
        (place, sequences): 100 * (medians[place, "fp8", sequences] / seconds - 1)
        for (place, arm, sequences), seconds in medians.items()
        if arm == "int8" and (place, "fp8", sequences) in medians
    }
    noisy = ahead.pop(("qwen2.5-7b", 256))
    int8, fp8 = (bars["qwen2.5-7b", arm, 256].seconds for arm in ("int8", "fp8"))
    said = "[again](throughput_again.md) {:.0f} to {:.0f} %, and {:.0f} % with 7B's short sequences,"
    said = said.format(min(ahead.values()), max(ahead.values()), noisy)
    assert f"{said} where FP8's two repeats differ by {spread(*fp8):.0f} %" in THROUGHPUT
    behind = [100 * (min(fp8) / seconds - 1) for seconds in int8]
    assert f"and the faster one is {min(behind):.0f} to {max(behind):.0f} % behind." in THROUGHPUT
    (kv,) = [row[7] for row in ROWS if (row[0], row[2][:3], row[3]) == ("qwen2.5-7b", "256", KV)]
    assert f"every size ({kv} with 7B's short sequences [again](throughput_again.md))" in THROUGHPUT
    short, long, *_, again = (row[7] for arm in (KV, "int8") for row in ROWS if (row[1], row[3]) == ("71", arm))
    said = f"again {again} x; INT8 with an INT8 KV cache {long} x, and {short} x with short ones ([again](docs/results/"
    assert said in " ".join((RESULTS.parents[1] / "README.md").read_text().split())


def test_the_pictures_are_of_these_measurements(tmp_path):
    for name, places in (
        ("throughput", ("qwen2.5-32b", "qwen2.5-14b")),
        ("more", ("qwen2.5-7b", "qwen2.5-32b, 71 GiB")),
    ):
        files = [file for place in places for file in (EARLIER[place][0], AGAIN[place])]
        rollout_figure.write(
            [bar for file in files for bar in rollout_figure.bars(RESULTS / file)], tmp_path / "again.png"
        )
        assert drawn(RESULTS / "throughput" / "again" / f"{name}.png") == drawn(tmp_path / "again.png")
