# SPDX-License-Identifier: Apache-2.0
"""pass@k against all subsets in exact fractions; intervals against how often they cover a truth that is known."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from flashrl_verl.tools import intervals
from flashrl_verl.tools.intervals import LEVEL, interval, per_problem


def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample():
    for n, k in itertools.product(range(1, 9), (2, 4, 8)):
        if k <= n:
            values = [[1.0] * correct + [0.0] * (n - correct) for correct in range(n + 1)]
            subsets = [list(itertools.combinations(own, k)) for own in values]
            expected = [float(Fraction(sum(map(any, chosen)), len(chosen))) for chosen in subsets]
            assert per_problem(values, n)[f"pass@{k}"].tolist() == pytest.approx(expected, abs=1e-12)


def test_intervals_cover_a_known_accuracy_as_often_as_they_say(monkeypatch):
    """400 evaluations of 100 problems with 4 samples each: problems differ in difficulty (Beta(1, 1)), samples of one
    do not. 95 % of 400 has a standard error of 1.1 points; percentiles of 100 problems cover about a point less."""
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)  # enough, in a tenth of the time
    rng = np.random.default_rng(0)
    covered = 0
    evaluations = 400
    for _ in range(evaluations):
        chance = rng.beta(1, 1, size=100)
        values = (rng.random((100, 4)) < chance[:, None]).astype(float)
        figure = interval(values.mean(axis=1))
        covered += figure.low <= 0.5 <= figure.high
    assert 0.915 < covered / evaluations < 0.975


def test_problems_that_are_all_alike_do_not_look_certain():
    right, wrong, same = interval(np.ones(30)), interval(np.zeros(30)), interval(np.zeros(30), floor=-1.0)
    # With this accuracy 30 of 30 right still happen in (1 - level) / 2 of all evaluations.
    assert right.low**30 == pytest.approx((1 - LEVEL) / 2) and right.high == 1.0
    assert wrong.low == 0.0 and wrong.high == pytest.approx(1 - right.low)
    assert (same.value, same.low, same.high) == (0.0, -wrong.high, wrong.high)
