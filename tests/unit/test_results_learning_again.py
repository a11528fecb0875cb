# SPDX-License-Identifier: Apache-2.0
"""What docs/results/learning.md and other places say of the repeats of an experiment, and of how many runs did what."""

import math
import statistics

import pytest
from learning_figures import MODELS, by_seed, error, over_models, pairs, record_of, welch
from result_pages import RESULTS, tables

FINAL = "final, BF16"
OUTLIERS = (*MODELS, "outliers-16")
ALL = (*OUTLIERS, "outliers-32-unfinished", "constant-rate")
ROOT = RESULTS.parents[1]


@pytest.fixture(scope="module")
def words() -> str:
    return text("docs/results/learning.md")


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def shown(gap: float, spread: float, low: float, high: float) -> str:
    return f"{gap:+.3f} ± {spread:.3f}, [{low:+.3f}, {high:+.3f}]"


def beside_bf16(record, arm: str, figure: str) -> tuple[float, float, float, float]:
    return welch(by_seed(record, arm, figure).values(), by_seed(record, "bf16:tis", figure).values())


def less_in_its_own_engine(record) -> str:
    final, own = (by_seed(record, "int8:tis", figure) for figure in (FINAL, "own"))
    gaps = [final[seed] - own[seed] for seed in final]
    return f"INT8 with TIS has {statistics.mean(gaps):.3f} ± {error(gaps):.3f} less in its own engine than in BF16"


def after_20(record) -> str:
    found = {"bf16": [], "int8": []}
    for run in record["runs"]:
        accuracy = dict(zip(run["series"]["accuracy"]["step"], run["series"]["accuracy"]["value"], strict=True))
        found[run["arm"].partition(":")[0]].append(accuracy[20])
    bounds = [bound(found[of]) for of in ("bf16", "int8") for bound in (min, max)]
    return "After twenty steps BF16 had {:.3f} to {:.3f}, INT8 {:.3f} to {:.3f}.".format(*bounds)


def test_how_far_int8_ended_from_bf16_the_second_time_is_in_words(words):
    again = record_of("outliers-32-again")
    with_tis, without = (beside_bf16(again, arm, FINAL) for arm in ("int8:tis", "int8:none"))
    errors = f"with TIS, which is {-with_tis[0] / with_tis[1]:.1f} standard errors"
    assert f"asked in BF16: {shown(*with_tis)}, {errors}, and {shown(*without)}, without;" in words
    own = [beside_bf16(again, arm, "own") for arm in ("int8:tis", "int8:none")]
    assert f"in their own engines: {shown(*own[0])}, and {shown(*own[1])} (Welch's intervals" in words
    assert f"{less_in_its_own_engine(again)} here. {after_20(again)}" in words


def test_how_far_int8_ended_from_bf16_the_third_time_is_in_words(words):
    third = record_of("outliers-32-third")

    def gap(one: str, other: str, figure: str = FINAL) -> str:
        return shown(*welch(by_seed(third, one, figure).values(), by_seed(third, other, figure).values()))

    said = f"{gap('int8:tis', 'bf16:tis')}, and {gap('int8:tis', 'int8:none')}; INT8 without TIS minus BF16 with TIS:"
    assert "**Asked in BF16, both arms with TIS ended between the two before**, as did their difference and" in words
    assert f"that of INT8 with and without: {said} {gap('int8:none', 'bf16:tis')}." in words
    for arm in ("bf16:tis", "int8:tis"):
        one, two, three = (statistics.mean(by_seed(record_of(name), arm, FINAL).values()) for name in MODELS)
        assert min(one, two) < three < max(one, two)
    for other in ("bf16:tis", "int8:none"):
        one, two, three = (statistics.mean(gaps) for gaps in pairs(other))
        assert min(one, two) < three < max(one, two)
    said = f"INT8 with TIS is {gap('int8:tis', 'bf16:tis', 'own')} from BF16 with TIS, INT8 without"
    assert (
        f"In their own engines {said} {gap('int8:none', 'bf16:tis', 'own')}. {less_in_its_own_engine(third)} (["
        in words
    )
    assert (
        f"below that of INT8 without TIS, {gap('int8:tis', 'int8:none', 'mean of curve')}: the only one of the "
        "[twenty-three]" in words
    )
    apart = [
        (name, pair["figure"], pair["minus"])
        for name in (*OUTLIERS, "constant-rate")
        for pair in record_of(name)["differences"]
        if math.prod(pair["welch"]["interval"]) > 0
    ]
    assert apart == [("outliers-32-third", "mean of curve", "int8:none")]
    assert after_20(third) in words


def test_which_steps_have_no_figures_is_in_words(words):
    lost = {}
    for name in OUTLIERS:
        for run in record_of(name)["runs"]:
            if missing := {*range(1, 61)} - {*run["series"]["k3_kl"]["step"]}:
                lost[name, run["arm"], run["seed"]] = sorted(missing)
    assert {name for name, *_ in lost} == {"outliers-32-third"} and sorted(map(len, lost.values())) == [1, 1, 2]
    assert "of which three of the third's runs lack one or two" in words


def test_how_far_the_repeat_is_from_the_first_is_in_words(words):
    first, again = map(record_of, MODELS[:2])
    bf16, int8 = (
        welch(*(by_seed(record, arm, FINAL).values() for record in (again, first))) for arm in ("bf16:tis", "int8:tis")
    )
    said = "**INT8 with TIS did not end within the spread of the first go**, which is of one model:"
    assert f"{said} {shown(*int8)}, from there; BF16 {shown(*bf16)}." in words and int8[3] < 0 < bf16[3]


def test_the_differences_over_models_are_in_words(words):
    of_bf16, without = pairs("bf16:tis"), pairs("int8:none")
    by_pair, none_by_pair = (f"± {error(sum(gaps, [])):.3f} over" for gaps in (of_bf16, without))
    said = (
        f"{shown(*over_models(of_bf16))} (95 %, Student's t over three means; {by_pair} nine pairs as if models did "
        "not count)."
    )
    assert f"INT8 with TIS minus BF16 with TIS is {said}" in words
    said = f"INT8 with TIS minus INT8 without is {shown(*over_models(without))} ({none_by_pair} pairs),"
    rest = sum(without, [])[1:]
    kept = (
        f"left out after it was seen, {statistics.mean(rest):+.3f} ± {error(rest):.3f} over eight, as if models did "
        "not count"
    )
    assert f"{said} which is the run that stayed behind: without its pair, {kept}" in words
    ends = sorted(map(statistics.mean, of_bf16))
    assert f"INT8 with TIS ended {-ends[0]:.3f} below to {ends[-1]:.3f} above BF16" in words
    assert {record_of(name)["settings"]["model_seed"] for name in MODELS} == {0}


def test_the_words_about_the_unfinished_go_say_what_the_runs_have(words):
    record = record_of("outliers-32-unfinished")
    curves, steps = {}, []
    for run in record["runs"]:
        accuracy = dict(zip(run["series"]["accuracy"]["step"], run["series"]["accuracy"]["value"], strict=True))
        curves.setdefault(run["arm"], []).append(accuracy)
        steps.append(run["step"])
    assert (min(steps), max(steps)) == (50, 60) and "ran out of time with its runs at steps 50 to 60" in words
    at_40 = [f"{curve[40]:.3f}" for arm in ("int8:none", "int8:tis", "bf16:tis") for curve in curves[arm]]
    said = "without correction had {}, {} and {}, INT8 with TIS {}, {} and {}, BF16 with TIS {}, {} and {};"
    assert said.format(*at_40) in words
    k3 = max(max(run["series"]["k3_kl"]["value"]) for run in record["runs"])
    assert f"k3 KL was {k3:.2e} at most" in words
    assert f"had steps of {k3:.4f} at most" in text("recipe/flashrl/README.md")
    said = f"{k3:.2e}".replace("e-02", "e-2")
    assert f"steps of {said} at most" in text("docs/precision_and_cap.md")
    assert f"had steps of up to {said}" in text("docs/precision_and_cap.md")


def test_how_many_runs_did_what_is_in_words_everywhere(words):
    """A run has stayed behind that had less than 0.6 at step 40; the others had 0.84 and more."""
    behind, without, rest = [], [], []
    for name in MODELS:
        for run in record_of(name)["runs"]:
            if run["arm"] == "int8:none":
                without.append(run)
            if run["series"]["accuracy"]["value"][2] < 0.6:
                behind.append((run["arm"], run["seed"]))
            else:
                rest.append(run["series"]["accuracy"]["value"][2])
    assert min(rest) > 0.84
    assert (behind, len(without)) == ([("int8:none", 0)], 9)
    assert "with much mismatch and no TIS, one run of nine stayed behind" in words
    assert "One of nine runs without TIS stayed behind ([all](docs/results/learning.md))." in text("README.md")
    assert "which [one of nine](results/learning.md) finished INT8 runs without TIS stayed behind" in text(
        "docs/evaluation.md"
    )
    unfinished = record_of("outliers-32-unfinished")["runs"]
    late = [run["series"]["accuracy"]["value"][2] for run in unfinished]
    assert min(late) > 0.9 and "One of nine did, and none of three more that were seen to step 40" in words
    assert all(run["series"]["accuracy"]["value"][-1] > 0.85 for run in record_of("outliers-16")["runs"])
    counts = {name: len(record_of(name)["runs"]) for name in ALL}
    assert sum(counts.values()) == 63 and words.count("Sixty-three runs of the recipe") == 1
    assert "[sixty-three runs](docs/results/learning.md)" in text("README.md")
    not_ended = sum(run["status"] == "unfinished" for run in unfinished)
    said = (
        "Five experiments, each with a warmed-up model of its own, and a sixth of nine runs, eight of them not to "
        "their end."
    )
    assert not_ended == 8 and said in words
    assert counts["constant-rate"] == 18
    assert "Eighteen runs of [the same task]" in text("docs/results/learning_no_outliers.md")


def test_correlations_of_runs_that_learned_are_in_words():
    guarded = record_of("outliers-guard")
    learned = [run for run in guarded["runs"] if (run["factor"], run["arm"], run["seed"]) != (32, "int8:none", 0)]
    least = min(min(run["correlation"]) for run in [*learned, *guarded["again"], *guarded["third"]])
    assert f"in healthy runs without outlier channels, with them down to {least:.2f};" in text(
        "docs/precision_and_cap.md"
    )


def test_what_the_page_on_precisions_says_of_accuracy_is_that_of_the_runs():
    (row,) = [row for row in tables("learning.md")[0][1:] if row[0].endswith("again")]
    below = -float(row[3].split()[0])
    assert f"one model's ended up to {below:.2f} below BF16" in text("docs/precision_and_cap.md")
