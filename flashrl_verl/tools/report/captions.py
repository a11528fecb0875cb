# SPDX-License-Identifier: Apache-2.0
"""What is said of a drawn panel: in words for those who do not see it, and of which runs it is where that are not
all."""

from __future__ import annotations

from collections.abc import Sequence

from flashrl_verl.tools.report.arms import Arm, NamedRun, curve
from flashrl_verl.tools.report.panels import Kind, Panel
from flashrl_verl.tools.report.step_time import step_parts, updates_per_hour


def incomplete_means(panel: Panel, arms: Sequence[Arm]) -> list[str]:
    """Arms of several runs that are not the mean of all of them in this panel: a few words each."""
    if panel.kind in (Kind.STEP_BARS, Kind.AGAINST_SPEED):
        return []  # no means: every run is there by itself
    told, by_time = [], panel.kind is Kind.OVER_TIME
    for arm in arms:
        drawn = curve(arm, panel.values, by_time)
        if drawn.runs and not drawn.x:
            told.append(f"{arm.label}: not drawn (its {drawn.runs} runs with values have no step in common)")
        elif 0 < drawn.runs < len(arm.runs):
            lacking = "no such values, or no step time" if by_time else "no such values"
            told.append(f"{arm.label}: mean of {drawn.runs} of its {len(arm.runs)} runs (the others logged {lacking})")
    return told


def alt_text(panel: Panel, arms: Sequence[Arm]) -> str:
    """What the picture shows, for those who do not see it."""
    if panel.kind is Kind.STEP_BARS:
        told = [_told_parts(run) for arm in arms for run in arm.runs]
        return f"Stacked bars. {panel.title}: {'; '.join(told)}."
    if panel.kind is Kind.AGAINST_SPEED:
        told = [_told_point(run, panel) for arm in arms for run in arm.runs]
        return f"Points. {panel.title}: {'; '.join(told)}."
    told = []
    for arm in arms:
        points = curve(arm, panel.values, against_time=panel.kind is Kind.OVER_TIME)
        ends = (
            f"from {points.y[0]:.3g} to {points.y[-1]:.3g}"
            if points.y
            else "not drawn"
            if points.runs
            else "not logged"
        )
        told.append(f"{arm.label} {ends}")
    return f"Lines. {panel.title}: {'; '.join(told)}."


def _told_point(run: NamedRun, panel: Panel) -> str:
    values, speed = panel.values(run.metrics)[1], updates_per_hour(run.metrics)
    return f"{run.label} {values[-1]:.3g} at {speed:.4g}" if values and speed is not None else f"{run.label} not logged"


def _told_parts(run: NamedRun) -> str:
    parts = step_parts(run.metrics)
    total = sum(parts.values())
    if not total:
        return f"{run.label} not logged"
    shares = ", ".join(f"{label} {seconds / total:.0%}" for label, seconds in parts.items() if seconds >= 0.01 * total)
    return f"{run.label} {total:.3g} s ({shares})"
