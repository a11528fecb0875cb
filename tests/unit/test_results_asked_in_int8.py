# SPDX-License-Identifier: Apache-2.0
"""What docs/results/learning_differences.md says of the last weights asked in BF16 and in INT8 is what the raw data have."""

import statistics
from collections import defaultdict

import pytest
from learning_figures import MODELS, by_seed, error, over_models, record_of
from result_pages import page, tables

PLACES = dict(zip(MODELS, ("32 times", "32 times, again", "32 times, third"), strict=True))


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
    worse = sum(row["int8_minus_bf16"]["high"] < 0 for row in rows)
    assert f"{worse} of {len(rows)} runs are worse in INT8 by a 95 % interval" in words
    gaps = defaultdict(lambda: defaultdict(list))
    for row in rows:
        gaps[row["arm"]][row["experiment"]].append(row["int8"] - row["bf16"])

    def beside(one: str, other: str) -> str:
        of_models = [[statistics.mean(gaps[one][model]) - statistics.mean(gaps[other][model])] for model in MODELS]
        mean, spread, low, high = over_models(of_models)
        assert low < 0 < high, "not seen"
        return f"{mean:+.3f} ± {spread:.3f}, [{low:+.3f}, {high:+.3f}]"

    assert f"with TIS minus that of BF16's runs is {beside('int8:tis', 'bf16:tis')}, without TIS minus" in words
    said = f"minus that of BF16's {beside('int8:none', 'bf16:tis')}, with TIS minus without {beside('int8:tis', 'int8:none')}."
    assert said in words
    moved = []
    for model in MODELS:
        for arm in gaps:
            on_gpu = by_seed(record_of(model), arm, "final, BF16")
            ours = {row["seed"]: row["bf16"] for row in rows if (row["experiment"], row["arm"]) == (model, arm)}
            moved += [ours[seed] - on_gpu[seed] for seed in on_gpu]
    assert f"BF16 itself is {statistics.mean(moved):+.3f} ± {error(moved):.3f} from what an H200" in words and len(moved) == 27
