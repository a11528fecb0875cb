# SPDX-License-Identifier: Apache-2.0
"""mean@n and pass@k of n samples a problem, and how sure they are.

Problems are the units that are drawn: n samples of 30 problems are not 30 n measurements. An interval is the
bootstrap's over problems (Efron 1979; percentiles), each with all of its samples. That of a difference between two
precisions draws the same problems for both, so what makes a problem hard cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
METHOD = f"bootstrap over problems, percentiles, {RESAMPLES} draws; where all problems agree, Clopper-Pearson's bound"

CORRECT = 1.0
"""Least value of a correct response."""

_CHUNK = 500
"""Draws made at once: at 10 000 problems their counts are 40 MB."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (round(number, 3) + 0.0 for number in (self.value, self.low, self.high))  # no -0.000
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, equation 1), as a product that does not overflow.

    Args:
        n: samples.
        correct: of them, 0 to n.
        k: 1 to n.
    """
    assert 0 <= correct <= n and 1 <= k <= n, (n, correct, k)
    if n - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def per_problem(values: list[list[float]], n: int) -> dict[str, np.ndarray]:
    """Return each metric's value for every problem.

    Args:
        values: of every response, by problem; each has at least ``n``.
        n: the largest k.

    Returns:
        ``mean@n``, and ``pass@k`` for k the powers of two from 2 on and ``n``: [problems] float64 each.
    """
    found = {f"mean@{n}": np.array([np.mean(own) for own in values])}
    correct = [(len(own), sum(value >= CORRECT for value in own)) for own in values]
    for k in sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | ({n} - {1})):
        found[f"pass@{k}"] = np.array([pass_at_k(samples, right, k) for samples, right in correct])
    return found


def interval(column: np.ndarray, floor: float = 0.0) -> Figure:
    """Return mean and interval of one quantity.

    Where all problems have one value, drawing them again says nothing. The interval then reaches as far as the largest
    chance of a problem that does otherwise and still fails to show up (Clopper and Pearson 1934).

    Args:
        column: [problems].
        floor: the least value possible: 0 for a metric, -1 for a difference of two; the largest is 1.
    """
    problems, value = len(column), float(column.mean())
    tail = (1 - LEVEL) / 2
    if np.ptp(column) == 0:
        reach = float(1 - tail ** (1 / problems))
        low, high = max(value - reach, min(floor, value)), min(value + reach, max(1.0, value))
    else:
        draws = np.random.default_rng(0)
        share = np.full(problems, 1.0 / problems)
        counts = (draws.multinomial(problems, share, size=_CHUNK) for _ in range(RESAMPLES // _CHUNK))
        means = np.concatenate([drawn @ column / problems for drawn in counts])
        low, high = map(float, np.quantile(means, [tail, 1 - tail]))
    return Figure(value=value, low=low, high=high)
