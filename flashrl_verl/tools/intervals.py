# SPDX-License-Identifier: Apache-2.0
"""mean@n and pass@k of n samples a problem, and how sure they are.

Problems are the units that are drawn: n samples of 30 problems are not 30 n measurements. An interval is the
bootstrap's over problems (Efron 1979; percentiles), each with all of its samples. That of a difference draws the same
problems for both, so what makes a problem hard cancels out.
"""

from math import comb
from typing import NamedTuple

import numpy as np

LEVEL, RESAMPLES = 0.95, 10_000
CORRECT = 1.0
"""Least value of a correct response."""


class Figure(NamedTuple):
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return "{:z.3f} [{:z.3f}, {:z.3f}]".format(*self)


def per_problem(values: list[list[float]], n: int) -> dict[str, np.ndarray]:
    """Return each metric's value for every problem.

    Args:
        values: of every response, by problem; each has at least ``n``.
        n: the largest k.

    Returns:
        ``mean@n``, and ``pass@k`` for k the powers of two from 2 on and ``n``, the unbiased estimate of the chance that
        one of k samples is correct (Chen et al. 2021, arXiv:2107.03374, equation 1): [problems] float64 each.
    """
    found = {f"mean@{n}": np.array([np.mean(own) for own in values])}
    wrong = [(sum(value < CORRECT for value in own), len(own)) for own in values]
    for k in sorted({2**i for i in range(1, n.bit_length())} | ({n} - {1})):
        found[f"pass@{k}"] = np.array([1 - comb(few, k) / comb(samples, k) for few, samples in wrong])
    return found


def interval(column: np.ndarray, floor: float = 0.0) -> Figure:
    """Return mean and interval of one quantity. Where all problems have one value, it reaches as far as the largest
    chance of a problem that does otherwise and still fails to show up (Clopper and Pearson 1934).

    Args:
        column: [problems].
        floor: the least value possible: 0 for a metric, -1 for a difference of two; the largest is 1.
    """
    problems, value, tail = len(column), float(column.mean()), (1 - LEVEL) / 2
    if np.ptp(column) == 0:
        reach = float(1 - tail ** (1 / problems))
        return Figure(value, max(value - reach, min(floor, value)), min(value + reach, max(1.0, value)))
    draws, share = np.random.default_rng(0), np.full(problems, 1 / problems)
    counts = (draws.multinomial(problems, share, size=100) for _ in range(RESAMPLES // 100))  # or memory is short
    means = np.concatenate([drawn @ column / problems for drawn in counts])
    return Figure(value, *np.quantile(means, [tail, 1 - tail]).tolist())
