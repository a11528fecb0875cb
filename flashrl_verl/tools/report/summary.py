# SPDX-License-Identifier: Apache-2.0
"""The table of a comparison: a row a run, in words and figures taken from its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashrl_verl.tools.report.arms import LAYERS, Arm, NamedRun, accuracy_keys, accuracy_name, mean
from flashrl_verl.tools.report.metrics import BF16_REPLICAS, MISMATCH_KL, MISSING, REJECTED, STEP_TIME, Metrics, show
from flashrl_verl.tools.report.palette import Style
from flashrl_verl.tools.report.panels import DROPPED, EFFECTIVE, GUARD_EVENTS, REFIT, ROLLOUT_SPEED, TRUNCATED
from flashrl_verl.tools.report.run import correction_words, held_precision
from flashrl_verl.tools.report.step_time import step_parts, updates_per_hour

REJECTED_COLUMN, SPEED_COLUMN, GUARD_COLUMN = "rejected, last", "rollout tokens/s, mean", "guard events"
OPTIONAL = {REJECTED_COLUMN, SPEED_COLUMN, GUARD_COLUMN}
"""Columns that are left out where no run logged what they show."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Header and rows; the first column names the run."""

    header: list[str]
    rows: list[list[str]]
    styles: list[Style]
    """Of the rows' arms."""


def summarize(arms: Sequence[Arm]) -> Summary:
    """The table of these runs. Nothing in it is smoothed."""
    keys = accuracy_keys(arms)
    runs = [(run, arm.style) for arm in arms for run in arm.runs]
    rows = [_row(run, keys) for run, _ in runs]
    header = [name for name in rows[0] if name not in OPTIONAL or any(row[name] != MISSING for row in rows)]
    return Summary(
        header=header, rows=[[row[name] for name in header] for row in rows], styles=[style for _, style in runs]
    )


def _row(run: NamedRun, keys: Sequence[str]) -> dict[str, str]:
    metrics, facts = run.metrics, run.report.run
    row = {
        "run": run.label,
        "precision": held_precision(facts.get("precision"), metrics.last(LAYERS), metrics.last(BF16_REPLICAS)),
        "correction": correction_words(facts.get("correction"), metrics),
        "steps": str(metrics.last_step),
    }
    for key in keys:
        name = accuracy_name(key, keys)
        row[f"{name}, first -> last"] = _first_last(metrics, key)
        row["best (step)" if len(keys) == 1 else f"{name}, best (step)"] = _best(metrics, key)
    parts = step_parts(metrics)
    total = sum(parts.values())
    return row | {
        "k3 KL, last": show(metrics.last(MISMATCH_KL), ".2e"),
        "ESS, last": show(metrics.last(EFFECTIVE), ".4f"),
        "truncated, last": _truncated(metrics),
        REJECTED_COLUMN: show(metrics.last(REJECTED), ".2g"),
        "s/step, mean": show(_mean(metrics, STEP_TIME), ".2f"),
        "updates/hour": show(updates_per_hour(metrics), ".1f"),
        SPEED_COLUMN: show(_mean(metrics, ROLLOUT_SPEED), ".0f"),
        "generation share": f"{parts['rollout'] / total:.1%}" if parts.get("rollout") else MISSING,
        "refit s, mean": show(_mean(metrics, REFIT), ".3g"),
        GUARD_COLUMN: show(metrics.last(GUARD_EVENTS), ".0f"),
    }


def _truncated(metrics: Metrics) -> str:
    """Share of the weights that are cut; with two bounds it is of those that become 0, and the cell says so."""
    dropped = metrics.last(DROPPED)
    return show(metrics.last(TRUNCATED), ".2g") if dropped is None else f"{show(dropped, '.2g')} dropped"


def _first_last(metrics: Metrics, key: str) -> str:
    steps, values = metrics.series(key)
    if len(values) < 2:
        return f"{show(values[0])} (step {steps[0]} only)" if values else MISSING
    return f"{show(values[0])} -> {show(values[-1])}"


def _best(metrics: Metrics, key: str) -> str:
    finite = [(value, -step) for step, value in zip(*metrics.series(key), strict=True) if math.isfinite(value)]
    if not finite:
        return MISSING
    value, step = max(finite)  # of equal ones the first
    return f"{value:.3f} ({-step})"


def _mean(metrics: Metrics, key: str) -> float | None:
    """Over the finite values, None without any: a step that was never timed has no time."""
    finite = [value for value in metrics.series(key)[1] if math.isfinite(value)]
    return mean(finite) if finite else None
