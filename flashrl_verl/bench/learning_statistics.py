# SPDX-License-Identifier: Apache-2.0
"""Means over a few seeds, and how sure they are.

Student's t (1908): seeds are few, and a bootstrap of three values has ten means to choose from. It takes the runs of an arm for
draws from a normal distribution, which so few cannot show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """None of one value, which says nothing about its spread."""
    seeds: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Covers the true mean in ``LEVEL`` of all such experiments; None of one value."""
        if self.standard_error is None:
            return None
        reach = t_quantile(self.seeds - 1) * self.standard_error
        return self.mean - reach, self.mean + reach


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of one value a seed, and its standard error s / sqrt(n); None of none. NaN stays."""
    if not values:
        return None
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 and all(map(math.isfinite, values)) else None
    return Estimate(mean=sum(values) / n, standard_error=error, seeds=n)


def paired(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Mean of ``one`` minus ``other`` over the seeds that both have; None where there is none.

    Args:
        one: a value by seed.
        other: the same of what it is compared with.
    """
    return estimate([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def t_quantile(freedom: int) -> float:
    """The t that |T| stays below with a probability of ``LEVEL``, to five digits.

    With t = sqrt(freedom) tan(a) the probability is the share of the area below cos^(freedom - 1) that lies below a.

    Args:
        freedom: degrees of freedom, from 1 on.
    """
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL, area / area[-1], angles)))
