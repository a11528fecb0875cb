# SPDX-License-Identifier: Apache-2.0
"""Figures of the learning runs in docs/results/learning, from their raw data, and what differences of them are
worth."""

import json
import math
import statistics
from collections.abc import Iterable
from typing import Any

from result_pages import RESULTS

from benchmarks.legacy_learning.learning_results import t_quantile

FIGURES = {
    "final, BF16": lambda run: run["bf16"]["mean@8"]["value"],
    "own": lambda run: run["series"]["accuracy"]["value"][-1],
    "mean of curve": lambda run: statistics.mean(run["series"]["accuracy"]["value"]),
}
MODELS = ("outliers-32", "outliers-32-again", "outliers-32-third")
"""Experiments with outlier channels 32 times as large, each from a warmed-up model of its own."""
T_95 = 4.30265
"""Student's t, 2 degrees of freedom."""


def record_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "learning" / f"{name}.json").read_text())


def by_seed(record: dict[str, Any], arm: str, figure: str) -> dict[int, float]:
    return {run["seed"]: FIGURES[figure](run) for run in record["runs"] if run["arm"] == arm}


def error(values: Iterable[float]) -> float:
    """Standard error of the mean."""
    values = [*values]
    return statistics.stdev(values) / math.sqrt(len(values))


def welch(one: Iterable[float], other: Iterable[float]) -> tuple[float, float, float, float]:
    """Difference of means, its standard error, and the ends of its 95 % interval (Welch and Satterthwaite)."""
    one, other = [*one], [*other]
    gap = statistics.mean(one) - statistics.mean(other)
    parts = [(error(values) ** 2, len(values) - 1) for values in (one, other)]
    freedom = sum(part for part, _ in parts) ** 2 / sum(part**2 / less for part, less in parts)
    spread = math.hypot(error(one), error(other))
    reach = t_quantile(freedom) * spread
    return gap, spread, gap - reach, gap + reach


def pairs(other: str) -> list[list[float]]:
    """INT8 with TIS minus another arm at the end, asked in BF16, of each of ``MODELS``, by seed."""
    found = []
    for record in map(record_of, MODELS):
        mine, theirs = (by_seed(record, arm, "final, BF16") for arm in ("int8:tis", other))
        found.append([mine[seed] - theirs[seed] for seed in sorted(mine)])
    return found


def over_models(gaps: Iterable[Iterable[float]]) -> tuple[float, float, float, float]:
    """Mean of three models' means, its standard error, and the ends of its 95 % interval (Student's t)."""
    means = [statistics.mean(of) for of in gaps]
    mean, spread = statistics.mean(means), error(means)
    return mean, spread, mean - T_95 * spread, mean + T_95 * spread
