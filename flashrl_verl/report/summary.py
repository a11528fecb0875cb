# SPDX-License-Identifier: Apache-2.0
"""The table of a comparison: a row a run, in words and figures taken from its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashrl_verl.report.arms import LAYERS, Arm, NamedRun, accuracy_keys, accuracy_name, mean
from flashrl_verl.report.metrics import IS_WEIGHTS, MISMATCH_KL, MISSING, STEP_TIME, Metrics, show
from flashrl_verl.report.palette import Style
from flashrl_verl.report.panels import EFFECTIVE, GUARD_EVENTS, REFIT, TRUNCATED, step_parts, updates_per_hour
from flashrl_verl.report.run import correction_words, held_precision


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
    guarded = any(run.metrics.series(GUARD_EVENTS)[0] for run, _ in runs)
    rows = [_row(run, keys, guarded) for run, _ in runs]
    return Summary(header=list(rows[0]), rows=[list(row.values()) for row in rows], styles=[style for _, style in runs])


def _row(run: NamedRun, keys: Sequence[str], guarded: bool) -> dict[str, str]:
    metrics, facts = run.metrics, run.report.run
    row = {
        "run": run.label,
        "precision": held_precision(facts.get("precision"), metrics.last(LAYERS)),
        "correction": correction_words(facts.get("correction"), bool(metrics.series(IS_WEIGHTS)[0])),
        "steps": str(metrics.last_step),
    }
    for key in keys:
        name = accuracy_name(key, keys)
        row[f"{name}, first -> last"] = _first_last(metrics, key)
        row["best (step)" if len(keys) == 1 else f"{name}, best (step)"] = _best(metrics, key)
    parts = step_parts(metrics)
    total = sum(parts.values())
    row |= {
        "k3 KL, last": show(metrics.last(MISMATCH_KL), ".2e"),
        "ESS, last": show(metrics.last(EFFECTIVE), ".4f"),
        "truncated, last": show(metrics.last(TRUNCATED), ".2g"),
        "s/step, mean": show(_mean(metrics, STEP_TIME), ".2f"),
        "updates/hour": show(updates_per_hour(metrics), ".1f"),
        "generation share": f"{parts['rollout'] / total:.1%}" if parts.get("rollout") else MISSING,
        "refit s, mean": show(_mean(metrics, REFIT), ".3g"),
    }
    if guarded:
        row["guard events"] = show(metrics.last(GUARD_EVENTS), ".0f")
    return row


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
