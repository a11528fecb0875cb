# SPDX-License-Identifier: Apache-2.0
"""mean@n and pass@k of n samples a problem, and how sure they are.

Problems are the units that are drawn: the samples of one problem are alike, and n samples of 30 problems are no 30 n
measurements. An interval is that of the bootstrap over problems (Efron 1979; percentiles), whole problems with all of
their samples; that of a difference between two precisions draws the same problems for both, so what makes a problem
hard cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""Draws of a bootstrap: the ends of a 95 % interval then repeat within a few hundredths of its width."""

LEVEL = 0.95

_CHUNK = 500
"""Draws made at once: at 10 000 problems their counts are 40 MB."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over problems, and the interval that covers the true one in ``LEVEL`` of all such evaluations, about."""

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


def ladder(n: int) -> list[int]:
    """Return the k of pass@k that are told of n samples: powers of two, and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def per_problem(values: np.ndarray, threshold: float) -> dict[str, np.ndarray]:
    """Return each metric's value for every problem.

    Args:
        values: [problems, n] what the reward gave each response.
        threshold: least value of a correct one.

    Returns:
        ``mean@n`` and ``pass@k`` for ``ladder(n)`` without 1, [problems] float64 each; pass@1 too where values other
        than 0 and 1 make it differ from the mean.
    """
    n = values.shape[1]
    correct = (values >= threshold).sum(axis=1)
    metrics = {f"mean@{n}": values.mean(axis=1, dtype=np.float64)}
    binary = np.array_equal(values, values >= threshold)
    for k in ladder(n):
        if k == 1 and binary:
            continue
        table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
        metrics[f"pass@{k}"] = table[correct]
    return metrics


def figures(columns: Sequence[np.ndarray], seed: int, resamples: int = RESAMPLES) -> list[Figure]:
    """Return mean and interval of several quantities of the same problems.

    Where all problems have one value, drawing them again says nothing. All 0 or all 1, the interval is the exact one of
    as many trials (Clopper and Pearson 1934: ``_reach`` wide); otherwise it has no width.

    Args:
        columns: [problems] each.
        seed: of the draws.
        resamples: how many draws; a multiple of 500.
    """
    assert resamples and resamples % _CHUNK == 0, resamples
    matrix = np.stack(columns, axis=1)
    problems = len(matrix)
    rng = np.random.default_rng(seed)
    share = np.full(problems, 1.0 / problems)
    means = np.concatenate(
        [rng.multinomial(problems, share, size=_CHUNK) @ matrix / problems for _ in range(resamples // _CHUNK)]
    )
    tail = (1 - LEVEL) / 2
    lows, highs = np.quantile(means, [tail, 1 - tail], axis=0)
    found = []
    for column, low, high in zip(matrix.T, lows, highs, strict=True):
        value = float(column.mean())
        if np.ptp(column) == 0:
            low = 1 - _reach(problems) if value == 1 else value
            high = _reach(problems) if value == 0 else value
        found.append(Figure(value=value, low=float(low), high=float(high)))
    return found


def differences(
    columns: Sequence[np.ndarray], baseline: Sequence[np.ndarray], seed: int, resamples: int = RESAMPLES
) -> list[Figure]:
    """Return ``columns`` minus ``baseline`` of the same problems, paired.

    Where no problem differs, or all do by 1 or by -1, the interval is what so many problems can exclude: the chance of
    one that does otherwise is at most ``_reach``, and a metric from 0 to 1 is then 1 further from 0, or 2 from 1 and
    -1.

    Args:
        columns: [problems] each.
        baseline: as ``columns``, in the same order of problems.
        seed: of the draws.
        resamples: how many draws; a multiple of 500.
    """
    pairs = [one - other for one, other in zip(columns, baseline, strict=True)]
    found = figures(pairs, seed, resamples)
    reach = _reach(len(pairs[0]))
    alike = {
        0.0: Figure(value=0.0, low=-reach, high=reach),
        1.0: Figure(value=1.0, low=1 - 2 * reach, high=1.0),
        -1.0: Figure(value=-1.0, low=-1.0, high=-1 + 2 * reach),
    }
    return [f if np.ptp(pair) else alike.get(float(pair[0]), f) for f, pair in zip(found, pairs, strict=True)]


def _reach(trials: int) -> float:
    """The largest chance of an event that still fails to happen in all trials in half of ``1 - LEVEL`` of all cases."""
    return float(1 - ((1 - LEVEL) / 2) ** (1 / trials))
