# SPDX-License-Identifier: Apache-2.0
"""The tables of learning runs in docs/results are those of the raw data beside them, and that is the mean of its runs."""

import json
import math
import re
import statistics

import pytest
from result_pages import RESULTS, page, tables

EXPERIMENTS = {"32 times": "outliers-32", "16 times": "outliers-16", "none": "constant-rate"}
"""In the order of the page, with their names in the table of differences."""
LOGGED = {"k3_kl": ".1e", "effective_sample_size": ".4f", "truncated_share": ".1e", "step_seconds": ".1f"}
FIGURES = {
    "final, BF16": lambda run: run["bf16"]["mean@8"]["value"],
    "own": lambda run: run["series"]["accuracy"]["value"][-1],
    "mean of curve": lambda run: statistics.mean(run["series"]["accuracy"]["value"]),
}
T_95 = 4.30265
"""Student's t, 2 degrees of freedom."""
SUMMARY, ARMS, DIFFERENCES, MISMATCH = 0, slice(1, 4), 4, 5
"""Tables of the page."""


@pytest.fixture(scope="module")
def records():
    return {place: json.loads((RESULTS / "learning" / f"{name}.json").read_text()) for place, name in EXPERIMENTS.items()}


def by_seed(record, arm: str, figure: str) -> dict[int, float]:
    return {run["seed"]: FIGURES[figure](run) for run in record["runs"] if run["arm"] == arm}


def figures_of(record) -> list[str]:
    return [name for name in FIGURES if name != "final, BF16" or record["runs"][0]["bf16"]]


def error(values) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def test_every_arm_is_in_the_table_with_its_figures(records):
    for record, table in zip(records.values(), tables("learning.md")[ARMS], strict=True):
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
            for low, high in ([mean - reach, mean + reach], pair["welch"]["interval"]):
                cells.append(f"[{low:+.3f}, {high:+.3f}]")
            expected.append([*cells, f"{pair['paired']['detectable']:.3f}"])
    assert tables("learning.md")[DIFFERENCES][1:] == expected


def test_the_summary_is_that_of_the_experiments(records):
    for row, record in zip(tables("learning.md")[SUMMARY][1:], reversed(records.values()), strict=True):
        bf16 = "final, BF16" in figures_of(record)
        cells = []
        for one, other in (("int8:tis", "bf16:tis"), ("int8:tis", "int8:none")):
            mine, theirs = ([*by_seed(record, arm, "final, BF16" if bf16 else "own").values()] for arm in (one, other))
            gap, spread = statistics.mean(mine) - statistics.mean(theirs), math.hypot(error(mine), error(theirs))
            cells.append(f"{gap:+.3f} ± {spread:.3f}" + ("" if bf16 else ", own engines"))
        k3 = [run["series"]["k3_kl"]["value"] for run in record["runs"] if run["arm"].startswith("int8")]
        mean, largest = statistics.mean(map(statistics.mean, k3)), max(map(max, k3))
        assert row[1:] == [f"{mean:.1e} ({largest:.1e})", *cells]


def test_the_words_say_what_the_runs_have(records):
    words = " ".join(page("learning.md").split())
    swing = next(
        run["series"]["accuracy"]["value"] for run in records["none"]["runs"] if (run["arm"], run["seed"]) == ("bf16:tis", 1)
    )
    assert f"had {swing[2]:.2f} at step 40, between {swing[1]:.2f} and {swing[3]:.2f}" in words
    most = records["32 times"]
    ends = [f"{value:.3f}" for value in by_seed(most, "int8:none", "final, BF16").values()]
    assert f"ended at {ends[0]}, {ends[1]} and {ends[2]}" in words
    fallen = next(run["series"] for run in most["runs"] if run["arm"] == "int8:none")
    before, twenty, *_ = fallen["accuracy"]["value"]
    assert f"went from {before:.3f} to {twenty:.3f} in twenty steps" in words
    assert f"rose to {max(fallen['k3_kl']['value']):.1e}" in words
    corrected = [run["series"]["accuracy"]["value"][1] for run in most["runs"] if run["arm"].endswith(":tis")]
    assert f"every run with TIS had {math.floor(100 * min(corrected)) / 100} or more" in words
    cut = next(arm["truncated_share"]["mean"] for arm in most["arms"] if arm["arm"] == "int8:tis")
    assert f"TIS cut one of {round(1 / cut, -3):,.0f} weights" in words
    seeds = [statistics.mean(by_seed(most, "int8:tis", figure).values()) for figure in ("final, BF16", "own")]
    assert f"INT8 with TIS is {seeds[0] - seeds[1]:.3f} lower than in BF16" in words
    starts = [records[place]["start"]["mean@8"]["value"] for place in ("16 times", "32 times")]
    assert "gives the starts {:.3f} (16) and {:.3f} (32)".format(*starts) in words
    gap = re.search(r"INT8 with TIS ends ([\d.]+) below BF16 with TIS, more than one standard error", words).group(1)
    pair = next(pair for pair in records["16 times"]["differences"] if pair["minus"] == "bf16:tis")
    assert gap == f"{-pair['paired']['mean']:.3f}" and pair["paired"]["interval"][1] < 0 < pair["welch"]["interval"][1]


def test_the_mismatch_of_outliers_is_in_the_table_with_its_figures():
    raw = json.loads((RESULTS / "learning" / "outliers-cpu.json").read_text())
    shown = {}
    for row in raw["mismatch"]:
        cell = f"{row['k3_kl']:.1e} ± {row['k3_kl_standard_error']:.0e}"
        shown.setdefault(str(row["factor"] or "none"), {})[row["precision"]] = cell
    expected = [[name, *(cells.get(arm, "not measured") for arm in ("bf16", "int8", "fp8"))] for name, cells in shown.items()]
    assert tables("learning.md")[MISMATCH][1:] == expected
    first = next(run for run in raw["first_steps"] if (run["factor"], run["arm"]) == (64, "bf16:none"))
    words = " ".join(page("learning.md").split())
    assert "With 64 BF16 itself fell from {:.2f} to {:.2f} in its second step".format(*first["score"]) in words
