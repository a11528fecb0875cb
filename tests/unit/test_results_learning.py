# SPDX-License-Identifier: Apache-2.0
"""The tables of learning runs in docs/results are those of the raw data beside them, and that is the mean of its runs."""

import json
import math
import re
import statistics

import pytest
from result_pages import RESULTS, page, tables

LOGGED = {"k3_kl": ".1e", "effective_sample_size": ".4f", "truncated_share": ".1e", "step_seconds": ".1f"}


@pytest.fixture(scope="module")
def record():
    return json.loads((RESULTS / "learning" / "constant-rate.json").read_text())


def by_seed(record, arm: str, take) -> dict[int, float]:
    return {run["seed"]: take(run["series"]) for run in record["runs"] if run["arm"] == arm}


def error(values) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def test_every_arm_is_in_the_table_with_its_figures(record):
    expected = []
    for arm in record["arms"]:
        last, curve = (
            [*by_seed(record, arm["arm"], take).values()]
            for take in (lambda s: s["accuracy"]["value"][-1], lambda s: statistics.mean(s["accuracy"]["value"]))
        )
        shown = [f"{statistics.mean(values):.3f} ± {error(values):.3f}" for values in (last, curve)]
        logged = []
        for name, form in LOGGED.items():
            logged.append(format(arm[name]["mean"], form) if arm[name] else "-")
            series = by_seed(record, arm["arm"], dict).values()
            of_runs = [statistics.mean(found[name]["value"]) for found in series if arm[name]]
            assert not of_runs or arm[name]["mean"] == pytest.approx(statistics.mean(of_runs), rel=1e-3)
        expected.append([arm["arm"], f"{arm['finished']}/{arm['runs']}", *shown, *logged])
    assert tables("learning.md")[0][1:] == expected


def test_every_difference_is_in_the_table_with_its_figures(record):
    shown = tables("learning.md")[1][1:]
    pairs = [pair for pair in record["differences"] if pair["figure"] == "mean of curve"]
    assert [row[:2] for row in shown] == [[pair["arm"], pair["minus"]] for pair in pairs]
    for row, pair in zip(shown, pairs, strict=True):
        one, other = (by_seed(record, pair[arm], lambda s: statistics.mean(s["accuracy"]["value"])) for arm in ("arm", "minus"))
        gaps = [one[seed] - other[seed] for seed in sorted(one)]
        reach = 4.30265 * error(gaps)  # Student's t, 2 degrees of freedom, 95 %
        mean = statistics.mean(gaps)
        low, high = pair["welch"]["interval"]
        assert row[2:] == [
            f"{mean:+.3f}",
            f"{error(gaps):.3f}",
            f"[{mean - reach:+.3f}, {mean + reach:+.3f}]",
            f"[{low:+.3f}, {high:+.3f}]",
            f"{pair['paired']['detectable']:.3f}",
        ]


def test_the_words_say_what_the_runs_have(record):
    words = " ".join(page("learning.md").split())
    last = {arm: [*by_seed(record, arm, lambda s: s["accuracy"]["value"][-1]).values()] for arm in ("int8:tis", "bf16:tis")}
    gap = statistics.mean(last["bf16:tis"]) - statistics.mean(last["int8:tis"])
    spread = math.hypot(*map(error, last.values()))
    below, said = re.search(
        r"INT8 with TIS ends ([\d.]+) below BF16 with TIS, a seventh .*? standard error \(([\d.]+)\)", words
    ).groups()
    assert (below, said) == (f"{gap:.3f}", f"{spread:.3f}") and round(spread / gap) == 7
    swing = by_seed(record, "bf16:tis", lambda s: s["accuracy"]["value"])[1]
    assert f"had {swing[2]:.2f} at step 40, between {swing[1]:.2f} and {swing[3]:.2f}" in words
