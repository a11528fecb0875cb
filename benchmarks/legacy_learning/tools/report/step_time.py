# SPDX-License-Identifier: Apache-2.0
"""What a step took, and what of it each part."""

from __future__ import annotations

import math

from benchmarks.legacy_learning.tools.report.metrics import STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.palette import PHASES


def step_parts(metrics: Metrics) -> dict[str, float]:
    """Mean seconds of each part of a step, by label, over the steps that logged their time; `other` is what is left."""
    rows = [row for row in metrics.rows.values() if math.isfinite(row.get(STEP_TIME, math.nan))]
    if not rows:
        return {}
    parts: dict[str, float] = {}
    for phase, (label, _) in PHASES.items():
        seconds = [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        if any(seconds):
            parts[label] = sum(s for s in seconds if math.isfinite(s)) / len(rows)
    total = sum(row[STEP_TIME] for row in rows) / len(rows)
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def updates_per_hour(metrics: Metrics) -> float | None:
    """Training steps per hour of training: 3600 over the mean step time."""
    total = sum(step_parts(metrics).values())
    return 3600 / total if total > 0 else None


def updates_by_step(metrics: Metrics) -> tuple[list[int], list[float]]:
    """Steps, and 3600 s over the time of each."""
    steps, seconds = metrics.series(STEP_TIME)
    return steps, [3600 / s if s > 0 else math.nan for s in seconds]
