# SPDX-License-Identifier: Apache-2.0
"""What docs/results/learning.md and other places say of the repeats of an experiment, and of how many runs did what."""

import math
import re
import statistics

import pytest
from learning_figures import by_seed, error, record_of, welch
from result_pages import RESULTS, page, tables

FINAL = "final, BF16"
OUTLIERS = ("outliers-32", "outliers-32-again", "outliers-16")
ALL = (*OUTLIERS, "outliers-32-unfinished", "constant-rate")
ROOT = RESULTS.parents[1]


@pytest.fixture(scope="module")
def words() -> str:
    return " ".join(page("learning.md").split())


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def shown(gap: float, spread: float, low: float, high: float) -> str:
    """A difference said as a distance below: the interval keeps its sign."""
    return f"{abs(gap):.3f} ± {spread:.3f}, [{low:+.3f}, {high:+.3f}]"


def test_how_far_below_bf16_int8_ended_is_in_words(words):
    again = record_of("outliers-32-again")

    def below(arm: str, figure: str) -> tuple[float, float, float, float]:
        return welch(by_seed(again, arm, figure).values(), by_seed(again, "bf16:tis", figure).values())

    (gap, spread, *ends), without = below("int8:tis", FINAL), below("int8:none", FINAL)
    said = f"by {-gap:.3f} ± {spread:.3f}, {-gap / spread:.1f} standard errors, [{ends[0]:+.3f}, {ends[1]:+.3f}], and by "
    assert f"{said}{shown(*without)}, intervals that hold 0" in words and ends[1] > 0 and without[3] > 0
    own = [below(arm, "own") for arm in ("int8:tis", "int8:none")]
    assert f"in their own engines by {shown(*own[0])}, and {shown(*own[1])}, which do not (Welch)" in words
    assert all(high < 0 for _, _, _, high in own)
    for pair in again["differences"]:
        for interval in (pair["paired"]["interval"], pair["welch"]["interval"]):
            assert interval[0] < 0 < interval[1]
    gaps = [one - other for one, other in zip(*(by_seed(again, "int8:tis", f).values() for f in (FINAL, "own")), strict=True)]
    assert (
        f"INT8 with TIS has {statistics.mean(gaps):.3f} ± {error(gaps):.3f} less in its own engine than in BF16 here" in words
    )
    after_20 = {"bf16": [], "int8": []}
    for run in again["runs"]:
        after_20[run["arm"].partition(":")[0]].append(run["series"]["accuracy"]["value"][1])
    bounds = [bound(after_20[of]) for of in ("bf16", "int8") for bound in (min, max)]
    assert "After twenty steps BF16 had {:.3f} to {:.3f}, INT8 {:.3f} to {:.3f}.".format(*bounds) in words


def test_how_far_the_repeat_is_from_the_first_is_in_words(words):
    first, again = (record_of(name) for name in OUTLIERS[:2])
    bf16, int8 = (
        welch(*(by_seed(record, arm, FINAL).values() for record in (first, again))) for arm in ("bf16:tis", "int8:tis")
    )

    def lower(gap: float, spread: float, low: float, high: float) -> str:
        return f"{gap:.3f} ± {spread:.3f} lower, [{low:+.3f}, {high:+.3f}]"

    assert f"**It is not within the spread of the first go**, which is of one model: BF16 ended {lower(*bf16)}, INT8" in words
    assert f"INT8 with TIS {lower(*int8)}." in words
    bf16, int8 = (
        [
            by_seed(record, "int8:tis", FINAL)[seed] - by_seed(record, other, FINAL)[seed]
            for record in (first, again)
            for seed in range(3)
        ]
        for other in ("bf16:tis", "int8:none")
    )
    said = "INT8 with TIS is {:.3f} ± {:.3f} below BF16 with TIS, and {:.3f} ± {:.3f} above INT8 without."
    assert said.format(-statistics.mean(bf16), error(bf16), statistics.mean(int8), error(int8)) in words
    rest = f"without its pair, left out after it was seen, {-statistics.mean(int8[1:]):.3f} ± {error(int8[1:]):.3f} below."
    assert rest in words
    one, other = (statistics.mean(bf16[start : start + 3]) for start in (0, 3))
    assert f"INT8 with TIS ended {-other:.3f} below to {one:.3f} above BF16" in words


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
    assert f"k3 KL was {k3:.1e} at most" in words
    most = f"{math.ceil(1000 * k3 - 0.5) / 1000:.3f}"
    assert most == "0.015" and f"had steps of {most} at most" in text("recipe/flashrl/README.md")
    assert "steps of 1.5e-2 at most" in text("docs/precision_and_cap.md")
    assert "had steps of up to 1.5e-2" in text("flashrl_verl/guard_settings.py")
    assert all(set(curve) <= {0, 20, 40, 60} for of in curves.values() for curve in of)


def test_how_many_runs_did_what_is_in_words_everywhere(words):
    """A run has stayed behind whose last validation with outliers is below 0.7; the others had 0.85 and more by step 40."""
    behind, without = [], []
    for name in OUTLIERS[:2]:
        for run in record_of(name)["runs"]:
            if run["arm"] == "int8:none":
                without.append(run)
            if run["series"]["accuracy"]["value"][-1] < 0.7:
                behind.append((run["arm"], run["seed"]))
    assert (behind, len(without)) == ([("int8:none", 0)], 6)
    assert "with much mismatch and no TIS, one run of six stayed behind" in words
    assert "matters: one of six runs without TIS stayed behind" in text("README.md")
    assert "which [one of six](results/learning.md) finished INT8 runs without TIS stayed behind" in text("docs/evaluation.md")
    unfinished = record_of("outliers-32-unfinished")["runs"]
    late = [run["series"]["accuracy"]["value"][2] for run in unfinished]
    assert min(late) > 0.9 and "One of six did, and none of three more that were seen to step 40" in words
    assert all(run["series"]["accuracy"]["value"][-1] > 0.85 for run in record_of("outliers-16")["runs"])
    counts = {name: len(record_of(name)["runs"]) for name in ALL}
    assert sum(counts.values()) == 54 and words.count("Fifty-four runs of the recipe") == 1
    assert "[fifty-four runs](docs/results/learning.md)" in text("README.md")
    not_ended = sum(run["status"] == "unfinished" for run in unfinished)
    assert (
        not_ended == 8
        and "Four experiments, each with a warmed-up model of its own, and a fifth of nine runs, eight of them" in words
    )
    assert counts["constant-rate"] == 18 and "Eighteen runs of [the same task]" in " ".join(
        page("learning_no_outliers.md").split()
    )


def test_correlations_of_runs_that_learned_are_in_words():
    guarded = record_of("outliers-guard")
    learned = [run for run in guarded["runs"] if (run["factor"], run["arm"], run["seed"]) != (32, "int8:none", 0)]
    least = min(min(run["correlation"]) for run in [*learned, *guarded["again"]])
    assert f"in healthy runs without outlier channels, with them down to {least:.2f};" in text("docs/precision_and_cap.md")


def test_what_the_page_on_precisions_says_of_accuracy_is_that_of_the_runs():
    (row,) = [row for row in tables("learning.md")[0][1:] if row[0].endswith("again")]
    below = -float(row[3].split()[0])
    assert f"one model's ended up to {below:.2f} below BF16" in re.sub(r"\s+", " ", text("docs/precision_and_cap.md"))
