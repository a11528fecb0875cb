# SPDX-License-Identifier: Apache-2.0
"""What docs/results/learning_differences.md says of the last weights asked in BF16 and in INT8 is what the raw data
have."""

import statistics
from collections import defaultdict

import pytest
from learning_figures import MODELS, by_seed, error, over_models, record_of
from result_pages import page, tables

PLACES = dict(zip(MODELS, ("32 times", "32 times, again", "32 times, third"), strict=True))
ARMS = ("bf16:tis", "int8:none", "int8:tis")


@pytest.fixture(scope="module")
def rows():
    return record_of("asked-in-int8")["runs"]


def test_every_arm_of_every_model_is_in_the_table(rows):
    found = defaultdict(list)
    for row in rows:
        found[PLACES[row["experiment"]], row["arm"]].append((row["bf16"], row["int8"]))
    expected = []
    for place, values in found.items():
        bf16, int8 = zip(*values, strict=True)
        gaps = [after - before for before, after in values]
        means = f"{statistics.mean(bf16):.3f}", f"{statistics.mean(int8):.3f}"
        expected.append([*place, *means, f"{statistics.mean(gaps):+.3f} ± {error(gaps):.3f}"])
        assert len(values) == 3
    assert tables("learning_differences.md")[1][1:] == expected and len(expected) == 9


def test_the_words_are_those_of_the_runs(rows):
    words = " ".join(page("learning_differences.md").split())
    assert all(row["int8_minus_bf16"]["value"] == pytest.approx(row["int8"] - row["bf16"], abs=2e-4) for row in rows)
    assert all(
        row["int8_minus_bf16"]["low"] < row["int8_minus_bf16"]["value"] < row["int8_minus_bf16"]["high"] for row in rows
    )
    worse = {arm: sum(r["int8_minus_bf16"]["high"] < 0 for r in rows if r["arm"] == arm) for arm in ARMS}
    assert worse == {"bf16:tis": 6, "int8:none": 6, "int8:tis": 9}
    assert f"{sum(worse.values())} of {len(rows)} runs are worse in INT8 by a 95 % interval" in words
    assert "six of nine whose rollouts were in BF16, six of INT8's nine without TIS, nine of nine with." in words
    gaps = {(row["experiment"], row["arm"], row["seed"]): row["int8"] - row["bf16"] for row in rows}

    def beside(one: str, other: str) -> list[list[float]]:
        return [[gaps[model, one, seed] - gaps[model, other, seed] for seed in range(3)] for model in MODELS]

    def said(pairs: list[list[float]]) -> tuple[str, str]:
        mean, spread, low, high = over_models(pairs)
        assert low < 0 < high, "not settled"
        return f"{mean:+.3f} ± {spread:.3f}, [{low:+.3f}, {high:+.3f}]", f"± {error(sum(pairs, [])):.3f}"

    corrected, without, between = (
        beside("int8:tis", "bf16:tis"),
        beside("int8:none", "bf16:tis"),
        beside("int8:tis", "int8:none"),
    )
    models, runs = said(corrected)
    assert f"with TIS minus BF16's runs {models} (over the three models; {runs} over nine pairs, as if models" in words
    models, runs = said(without)
    assert f"without TIS minus BF16's {models} ({runs}), less lost in each of the models;" in words
    assert all(statistics.mean(of) > 0 for of in without)
    models, runs = said(between)
    assert f"with TIS minus without {models} ({runs}), more lost in each." in words
    assert all(statistics.mean(of) < 0 for of in between)
    moved = []
    for model in MODELS:
        for arm in ARMS:
            on_gpu = by_seed(record_of(model), arm, "final, BF16")
            ours = {row["seed"]: row["bf16"] for row in rows if (row["experiment"], row["arm"]) == (model, arm)}
            moved += [ours[seed] - on_gpu[seed] for seed in on_gpu]
    assert (
        f"BF16 itself is {statistics.mean(moved):+.3f} ± {error(moved):.3f} from what an H200" in words
        and len(moved) == 27
    )
    assert (
        f"With vLLM {record_of('asked-in-int8')['environment']['vllm'].removesuffix('+cpu')} there BF16 itself" in words
    )
    assert f"gave for the same runs, {min(moved):+.3f} to {max(moved):+.3f} by run." in words
