# SPDX-License-Identifier: Apache-2.0
"""The tables of learning runs in docs/results are those of the raw data beside them, and that is the mean of its
runs."""

import itertools
import json
import math
import statistics

import pytest
from learning_figures import FIGURES, T_95, by_seed, error, record_of
from result_pages import RESULTS, page, tables

from flashrl_verl.settings import GuardConfig

EXPERIMENTS = {
    "32 times": "outliers-32",
    "32 times, again": "outliers-32-again",
    "32 times, third": "outliers-32-third",
    "16 times": "outliers-16",
    "none": "constant-rate",
}
"""In the order of the pages, with their names in the tables of differences; the last has a page of its own."""
LOGGED = {"k3_kl": ".1e", "effective_sample_size": ".4f", "truncated_share": ".1e", "step_seconds": ".1f"}
SUMMARY, ARMS = 0, slice(1, 5)
"""Tables of the page."""
ALONE, DIFFERENCES = "learning_no_outliers.md", "learning_differences.md"


@pytest.fixture(scope="module")
def records():
    return {place: record_of(name) for place, name in EXPERIMENTS.items()}


def figures_of(record) -> list[str]:
    return [name for name in FIGURES if name != "final, BF16" or record["runs"][0]["bf16"]]


def test_every_arm_is_in_the_table_with_its_figures(records):
    for record, table in zip(records.values(), [*tables("learning.md")[ARMS], tables(ALONE)[0]], strict=True):
        expected = []
        for arm in record["arms"]:
            found = [[*by_seed(record, arm["arm"], figure).values()] for figure in figures_of(record)]
            shown = [f"{statistics.mean(values):.3f} ± {error(values):.3f}" for values in found]
            logged = []
            for name, form in LOGGED.items():
                logged.append(format(arm[name]["mean"], form) if arm[name] else "-")
                series = [run["series"] for run in record["runs"] if run["arm"] == arm["arm"]]
                of_runs = [statistics.mean(one[name]["value"]) for one in series if arm[name]]
                assert not of_runs or arm[name]["mean"] == pytest.approx(statistics.mean(of_runs), rel=1e-3)
            expected.append([arm["arm"], f"{arm['finished']}/{arm['runs']}", *shown, *logged])
        assert table[1:] == expected


def test_every_difference_is_in_the_table_with_its_figures(records):
    expected = []
    for place, record in records.items():
        for pair in record["differences"]:
            one, other = (by_seed(record, pair[arm], pair["figure"]) for arm in ("arm", "minus"))
            gaps = [one[seed] - other[seed] for seed in sorted(one)]
            mean, reach = statistics.mean(gaps), T_95 * error(gaps)
            assert pair["paired"]["interval"] == pytest.approx([mean - reach, mean + reach], abs=2e-4)
            cells = [place, pair["arm"], pair["minus"], pair["figure"], f"{mean:+.3f}", f"{error(gaps):.3f}"]
            ours, theirs = (error([*values.values()]) for values in (one, other))
            freedom = (ours**2 + theirs**2) ** 2 / ((ours**4 + theirs**4) / (len(one) - 1))  # Welch and Satterthwaite
            assert pair["welch"]["freedom"] == pytest.approx(freedom, rel=2e-2)
            assert pair["welch"]["standard_error"] == pytest.approx(math.hypot(ours, theirs), rel=1e-2)
            for low, high in ([mean - reach, mean + reach], pair["welch"]["interval"]):
                cells.append(f"[{low:+.3f}, {high:+.3f}]")
            expected.append([*cells, f"{pair['paired']['detectable']:.3f}"])
    table = tables(DIFFERENCES)[0]
    assert table[1:] == expected and len(expected) == 23
    assert "twenty-three differences between arms" in page(DIFFERENCES) and "[Twenty-three differences]" in page(
        "learning.md"
    )


def test_the_summary_is_that_of_the_experiments(records):
    names = {
        "none": "as warmed up",
        "16 times": "16 times as large",
        "32 times": "32 times as large",
        "32 times, again": "again",
        "32 times, third": "third",
    }
    for row, (place, name) in zip(tables("learning.md")[SUMMARY][1:], names.items(), strict=True):
        record, cells = records[place], []
        for arm in ("int8:tis", "int8:none"):
            k3 = [run["series"]["k3_kl"]["value"] for run in record["runs"] if run["arm"] == arm]
            cells.append(f"{statistics.mean(map(statistics.mean, k3)):.1e} ({max(map(max, k3)):.1e})")
        for one, other in (("int8:tis", "bf16:tis"), ("int8:tis", "int8:none")):
            mine, theirs = ([*by_seed(record, arm, final_of(record)).values()] for arm in (one, other))
            gap, spread = statistics.mean(mine) - statistics.mean(theirs), math.hypot(error(mine), error(theirs))
            cells.append(f"{gap:+.3f} ± {spread:.3f}")
        assert name in row[0] and row[1:] == cells


def test_every_table_of_arms_is_under_its_experiment(records):
    for place in EXPERIMENTS:
        section = (
            page(ALONE) if place == "none" else page("learning.md").partition(f"## {place}\n")[2].partition("\n## ")[0]
        )
        assert f"(learning/{EXPERIMENTS[place]}.png)" in section
        ours = [arm for arm in records[place]["arms"] if arm["arm"] == "int8:tis"]
        assert f"| int8:tis | 3/3 | {ours[0]['accuracy' if ours[0]['accuracy'] else 'own']['mean']:.3f} ±" in section


def final_of(record) -> str:
    return figures_of(record)[0]


@pytest.fixture(scope="module")
def words() -> str:
    return " ".join(page("learning.md").split())


def test_the_words_about_constant_rate_say_what_the_runs_have(records):
    words = " ".join(page(ALONE).split())
    runs = records["none"]["runs"]
    swing = next(run["series"]["accuracy"]["value"] for run in runs if (run["arm"], run["seed"]) == ("bf16:tis", 1))
    assert f"had {swing[2]:.2f} at step 40, between {swing[1]:.2f} and {swing[3]:.2f}" in words


def test_the_words_about_32_times_say_what_the_runs_have(records, words):
    record = records["32 times"]
    ends = [f"{value:.3f}" for value in by_seed(record, "int8:none", "final, BF16").values()]
    assert "ended at {}, {} and {}.".format(*ends) in words
    curves = [run["series"]["accuracy"]["value"] for run in record["runs"] if run["arm"] == "int8:none"]
    assert "they had {:.3f}, {:.3f} and {:.3f}:".format(*(curve[1] for curve in curves)) in words
    k3 = [run["series"]["k3_kl"]["value"] for run in record["runs"] if run["arm"] == "int8:none"]
    assert f"went down from {curves[0][0]:.3f}, while its k3 KL rose to {max(k3[0]):.1e}" in words
    corrected = [run["series"]["accuracy"]["value"][1] for run in record["runs"] if run["arm"].endswith(":tis")]
    assert f"every run with TIS had {math.floor(100 * min(corrected)) / 100} or more" in words
    cut = next(arm["truncated_share"]["mean"] for arm in record["arms"] if arm["arm"] == "int8:tis")
    assert 3900 < 1 / cut < 4000 and "TIS cut one of 4,000 weights" in words
    final, own = (by_seed(record, "int8:tis", figure) for figure in ("final, BF16", "own"))
    gaps = [final[seed] - own[seed] for seed in final]
    assert f"has {statistics.mean(gaps):.3f} ± {error(gaps):.3f} less in its own engine" in words
    starts = [records[place]["start"]["mean@8"]["value"] for place in [*EXPERIMENTS][:4]]
    assert "gives the starts {:.3f} (32), {:.3f} (again), {:.3f} (third) and {:.3f} (16)".format(*starts) in words


def test_the_words_about_the_guard_say_what_the_runs_have(records, words):
    def in_a_row(values, limit: float) -> int:
        return max(
            (len([*group]) for above, group in itertools.groupby(value > limit for value in values) if above), default=0
        )

    runs = {
        (place, run["arm"], run["seed"]): run["series"]["k3_kl"]["value"]
        for place in records
        for run in records[place]["runs"]
    }
    behind = runs.pop(("32 times", "int8:none", 0))
    assert sum(value > 1e-2 for value in behind) == 20 and in_a_row(behind, 2e-2) == 5 and max(behind) < 0.05
    finished = [*runs.values()]
    unfinished = [run["series"]["k3_kl"]["value"] for run in record_of("outliers-32-unfinished")["runs"]]
    assert max(sum(value > 1e-2 for value in values) for values in [*finished, *unfinished]) == 2
    assert [max(in_a_row(values, 1e-2) for values in of) for of in (finished, unfinished)] == [2, 2]
    assert "Others crossed 1e-2 in two of their steps at most, two of them in a row in one of the third model" in words
    assert max(map(max, [*finished, *unfinished])) < 2e-2  # the guard's limit of today: it spoke in none
    assert "twenty steps with a k3 KL above 1e-2, five in a row above 2e-2" in words and GuardConfig().k3_kl_max == 2e-2
    spoken = next(step for step in range(3, 61) if all(value > 2e-2 for value in behind[step - 3 : step]))
    guarded = record_of("outliers-guard")
    (scores,) = (
        run["score"] for run in guarded["runs"] if (run["factor"], run["arm"], run["seed"]) == (32, "int8:none", 0)
    )
    said = "it would have spoken in step {}, when the training score had fallen from {:.2f} to {:.2f}."
    assert said.format(spoken, scores[0], scores[spoken - 1]) in words and GuardConfig().patience == 3
    watched = guarded["runs"]
    first = {
        (run["factor"], run["arm"], run["seed"]): next((i + 1 for i, n in enumerate(run["events"]) if n), None)
        for run in watched
    }
    warned = {key: step for key, step in first.items() if step}
    assert {key[:2] for key in warned} == {(32, "int8:none"), (32, "int8:tis")} and len(warned) == 6
    assert warned.pop((32, "int8:none", 0)) == 4 and (min(warned.values()), max(warned.values())) == (8, 33)
    assert "in the one first in step 4, in the others first between 8 and 33" in words
    later = {
        (run["arm"], run["seed"]): next((i + 1 for i, n in enumerate(run["events"]) if n), None)
        for run in guarded["again"]
    }
    assert (
        sorted(step for step in later.values() if step) == [29, 31] and later["int8:none", 1] and later["int8:tis", 1]
    )
    assert "spoke in none, `correlation_min` in two of the six, in steps 29 and 31" in words
    third = {(run["arm"], run["seed"]): dict(zip(run["step"], run["events"], strict=True)) for run in guarded["third"]}
    spoke = {
        key: next(step for step, n in events.items() if n) for key, events in third.items() if any(events.values())
    }
    assert {arm: step for (arm, _), step in spoke.items()} == {"int8:tis": 28} and len(spoke) == 1
    assert "The guard spoke once (`correlation_min`, step 28 of an INT8 run with TIS)." in words
    for run in [
        *watched,
        *guarded["again"],
        *guarded["third"],
    ]:  # three steps in a row below 0.9, and nothing else, warned
        steps, low = run.get("step", [*range(1, 61)]), [value < 0.9 for value in run["correlation"]]
        found = [step for i, step in enumerate(steps) if i > 1 and all(low[i - 2 : i + 1])]
        assert next(iter(found), None) == next((step for step, n in zip(steps, run["events"], strict=True) if n), None)


def test_the_words_about_16_times_say_what_the_runs_have(records, words):
    record = records["16 times"]
    mine, theirs = (by_seed(record, arm, "final, BF16") for arm in ("int8:tis", "bf16:tis"))
    gaps = [mine[seed] - theirs[seed] for seed in mine]
    gap = statistics.mean(gaps)
    by_runs = math.hypot(error([*mine.values()]), error([*theirs.values()]))
    errors = f"{-gap / error(gaps):.1f} standard errors paired by seed, {-gap / by_runs:.1f} unpaired"
    assert f"{-gap:.3f} below BF16 with TIS: {errors}" in words
    pair = next(pair for pair in record["differences"] if pair["minus"] == "bf16:tis")
    assert pair["paired"]["interval"][1] < 0 < pair["welch"]["interval"][1]
    assert "one of twenty-three differences" in words
    first, again, third = (
        statistics.mean(by_seed(records[place], "bf16:tis", "final, BF16").values()) for place in [*EXPERIMENTS][:3]
    )
    mean = statistics.mean(theirs.values())
    above = f"{mean - again:.3f} above the second and the third."
    assert f"{mean - third:.3f}" == f"{mean - again:.3f}"
    assert f"is {first - mean:.3f} below the first experiment with 32, {above}" in words


def test_the_mismatch_of_outliers_is_in_the_table_with_its_figures():
    words = " ".join(page("mismatch.md").split())
    raw = json.loads((RESULTS / "learning" / "outliers-cpu.json").read_text())
    shown, tokens = {}, {}
    for row in raw["mismatch"]:
        name = str(row["factor"] or "none")
        tokens.setdefault(name, str(row["tokens"]))
        shown.setdefault(name, {})[row["precision"]] = f"{row['k3_kl']:.1e} ± {row['k3_kl_standard_error']:.0e}"
    arms = ("bf16", "int8", "fp8")
    expected = [
        [name, tokens[name], *(cells.get(arm, "not measured") for arm in arms)] for name, cells in shown.items()
    ]
    assert tables("mismatch.md")[-1][1:] == expected
    first = {(run["factor"], run["arm"]): run for run in raw["first_steps"]}
    scores = first[64, "bf16:none"]["score"]
    assert (
        "With 64, the training score of BF16 itself fell from {:.2f} to {:.2f} in its second step".format(*scores)
        in words
    )
    k3 = first[64, "int8:none"]["k3_kl"]
    said = f"{min(k3):.1e} to {max(k3):.1e} in all of {len(k3)} steps".replace("e-0", "e-")
    guard = (RESULTS.parent / "precision_and_cap.md").read_text()
    assert f"had {said}, fell back and rose again" in " ".join(guard.split())
    correlations = first[64, "int8:none"]["correlation"]
    log = " ".join((RESULTS.parent / "LOG.md").read_text().split())
    assert f"the correlation of probabilities {min(correlations):.2f} to {max(correlations):.2f}" in log


def test_the_page_on_precisions_says_how_outliers_turn_the_two_round():
    raw = json.loads((RESULTS / "learning" / "outliers-cpu.json").read_text())
    k3 = {(row["factor"], row["precision"]): row["k3_kl"] for row in raw["mismatch"]}
    assert 1 < k3[16, "int8"] / k3[16, "fp8"] < 2
    ratio = k3[64, "int8"] / k3[64, "fp8"]
    said = f"with some 16 times as large has more mismatch in INT8 than in FP8, with 64 times {ratio:.0f} times"
    assert said in " ".join(page("../precision_and_cap.md").split())


def test_the_page_on_precisions_says_how_much_smaller_int8s_mismatch_is_without_outliers(records):
    ratios = []
    for file in (RESULTS / "mismatch").glob("*.json"):
        rows = [row for row in json.loads(file.read_text())["results"] if row.get("kv_cache", "auto") == "auto"]
        for which in ("own", "common"):
            kl = {row["precision"]: row[which]["rollout_corr/k3_kl"] for row in rows}
            if {"int8", "fp8"} <= kl.keys():
                ratios.append(kl["fp8"] / kl["int8"])
    kl = {arm["arm"]: arm["k3_kl"]["mean"] for arm in records["none"]["arms"]}
    for correction in ("none", "tis"):
        ratios.append(kl[f"fp8:{correction}"] / kl[f"int8:{correction}"])
    assert len(ratios) == 8
    said = f"its mismatch is {min(ratios):.0f} to {max(ratios):.0f} times smaller"
    assert said in " ".join(page("../precision_and_cap.md").split())
