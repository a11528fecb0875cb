# SPDX-License-Identifier: Apache-2.0
"""What docs/results/learning.md and other places say of the repeats of an experiment, and of how many runs did what."""

import statistics

import pytest
from learning_figures import by_seed, error, record_of, welch
from result_pages import RESULTS, tables

FINAL = "final, BF16"
OUTLIERS = ("outliers-32", "outliers-32-again", "outliers-16")
ALL = (*OUTLIERS, "outliers-32-unfinished", "constant-rate")
ROOT = RESULTS.parents[1]


@pytest.fixture(scope="module")
def words() -> str:
    return text("docs/results/learning.md")


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def shown(gap: float, spread: float, low: float, high: float) -> str:
    return f"{gap:+.3f} ± {spread:.3f}, [{low:+.3f}, {high:+.3f}]"


def test_how_far_int8_ended_from_bf16_is_in_words(words):
    again = record_of("outliers-32-again")

    def beside_bf16(arm: str, figure: str) -> tuple[float, float, float, float]:
        return welch(by_seed(again, arm, figure).values(), by_seed(again, "bf16:tis", figure).values())

    with_tis, without = (beside_bf16(arm, FINAL) for arm in ("int8:tis", "int8:none"))
    errors = f"with TIS, which is {-with_tis[0] / with_tis[1]:.1f} standard errors"
    assert f"asked in BF16: {shown(*with_tis)}, {errors}, and {shown(*without)}, without;" in words
    own = [beside_bf16(arm, "own") for arm in ("int8:tis", "int8:none")]
    assert f"in their own engines: {shown(*own[0])}, and {shown(*own[1])} (Welch's intervals" in words
    assert with_tis[3] > 0 and without[3] > 0 > max(high for _, _, _, high in own)  # the README: "in intervals that hold 0"
    final, in_own = (by_seed(again, "int8:tis", figure) for figure in (FINAL, "own"))
    gaps = [final[seed] - in_own[seed] for seed in final]
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
        welch(*(by_seed(record, arm, FINAL).values() for record in (again, first))) for arm in ("bf16:tis", "int8:tis")
    )
    said = "**INT8 with TIS did not end within the spread of the first go**, which is of one model:"
    assert f"{said} {shown(*int8)}, from there; BF16 {shown(*bf16)}." in words and int8[3] < 0 < bf16[3]

    def pairs(other: str) -> list[list[float]]:
        """Of each model, by seed."""
        found = []
        for record in (first, again):
            mine, theirs = (by_seed(record, arm, FINAL) for arm in ("int8:tis", other))
            found.append([mine[seed] - theirs[seed] for seed in sorted(mine)])
        return found

    beside_bf16, without = pairs("bf16:tis"), pairs("int8:none")
    (gap, by_run, by_model), none = (
        (statistics.mean(sum(of, [])), error(sum(of, [])), error(map(statistics.mean, of))) for of in (beside_bf16, without)
    )
    said = f"is {gap:+.3f}, ± {by_run:.3f} over six pairs as if models did not count, ± {by_model:.3f} over two models;"
    assert f"{said} minus INT8 without TIS it is {none[0]:+.3f}, ± {none[1]:.3f} and ± {none[2]:.3f}." in words
    rest = sum(without, [])[1:]
    assert f"left out after it was seen, {statistics.mean(rest):+.3f} ± {error(rest):.3f} over five." in words
    one, other = map(statistics.mean, beside_bf16)
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
    assert f"k3 KL was {k3:.2e} at most" in words
    assert f"had steps of {k3:.4f} at most" in text("recipe/flashrl/README.md")
    said = f"{k3:.2e}".replace("e-02", "e-2")
    assert f"steps of {said} at most" in text("docs/precision_and_cap.md")
    assert f"had steps of up to {said};" in text("flashrl_verl/guard_settings.py")


def test_how_many_runs_did_what_is_in_words_everywhere(words):
    """A run has stayed behind that had less than 0.6 at step 40; the others had 0.84 and more."""
    behind, without, rest = [], [], []
    for name in OUTLIERS[:2]:
        for run in record_of(name)["runs"]:
            if run["arm"] == "int8:none":
                without.append(run)
            if run["series"]["accuracy"]["value"][2] < 0.6:
                behind.append((run["arm"], run["seed"]))
            else:
                rest.append(run["series"]["accuracy"]["value"][2])
    assert min(rest) > 0.84
    assert (behind, len(without)) == ([("int8:none", 0)], 6)
    assert "with much mismatch and no TIS, one run of six stayed behind" in words
    assert "One of six runs without TIS stayed behind." in text("README.md")
    assert "which [one of six](results/learning.md) finished INT8 runs without TIS stayed behind" in text("docs/evaluation.md")
    unfinished = record_of("outliers-32-unfinished")["runs"]
    late = [run["series"]["accuracy"]["value"][2] for run in unfinished]
    assert min(late) > 0.9 and "One of six did, and none of three more that were seen to step 40" in words
    assert all(run["series"]["accuracy"]["value"][-1] > 0.85 for run in record_of("outliers-16")["runs"])
    counts = {name: len(record_of(name)["runs"]) for name in ALL}
    assert sum(counts.values()) == 54 and words.count("Fifty-four runs of the recipe") == 1
    assert "[fifty-four runs](docs/results/learning.md)" in text("README.md")
    not_ended = sum(run["status"] == "unfinished" for run in unfinished)
    said = "Four experiments, each with a warmed-up model of its own, and a fifth of nine runs, eight of them not to their end."
    assert not_ended == 8 and said in words
    assert counts["constant-rate"] == 18
    assert "Eighteen runs of [the same task]" in text("docs/results/learning_no_outliers.md")


def test_correlations_of_runs_that_learned_are_in_words():
    guarded = record_of("outliers-guard")
    learned = [run for run in guarded["runs"] if (run["factor"], run["arm"], run["seed"]) != (32, "int8:none", 0)]
    least = min(min(run["correlation"]) for run in [*learned, *guarded["again"]])
    assert f"in healthy runs without outlier channels, with them down to {least:.2f};" in text("docs/precision_and_cap.md")


def test_what_the_page_on_precisions_says_of_accuracy_is_that_of_the_runs():
    (row,) = [row for row in tables("learning.md")[0][1:] if row[0].endswith("again")]
    below = -float(row[3].split()[0])
    assert f"one model's ended up to {below:.2f} below BF16" in text("docs/precision_and_cap.md")
