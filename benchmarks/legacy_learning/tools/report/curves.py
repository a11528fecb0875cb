# SPDX-License-Identifier: Apache-2.0
"""The curves of a run, drawn without a display, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.legacy_learning.tools.report.figure import new_figure, save
from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT, MISMATCH_KL, SCORE, STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.palette import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    HEALTHY_KL,
    ORANGE,
    PHASES,
    PURPLE,
    TITLE,
    VERMILION,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_curves(metrics: Metrics, path: Path) -> None:
    """Draw accuracy and score, mismatch KL, and step time side by side.

    Args:
        metrics: what to draw; what was not logged is said in the panel, values that are not finite are marked
            on its floor.
        path: the PNG to write.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    figure = new_figure(13, 3.9)
    learning, mismatch, time = figure.subplots(1, 3)
    _draw_learning(learning, metrics)
    _draw_mismatch(mismatch, metrics)
    _draw_time(time, metrics)
    for axes in (learning, mismatch, time):
        axes.set_xlabel("training step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _draw_learning(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Accuracy and score", **TITLE)
    keys = metrics.keys(HELD_OUT)
    for key, color in zip(keys, (BLUE, GREEN, VERMILION, PURPLE), strict=False):
        steps, values = metrics.series(key)
        source = "" if len(keys) == 1 else f" ({HELD_OUT.fullmatch(key)['source']})"
        axes.plot(steps, values, "o-", color=color, linewidth=2, label=f"held-out accuracy{source}", zorder=3)
        for index, side in {0: "left", len(steps) - 1: "right"}.items():
            if math.isfinite(values[index]):
                axes.annotate(
                    f"{values[index]:.0%}",
                    (steps[index], values[index]),
                    xytext=(0, 7 if index else -15),  # the first one below: the score starts above it
                    textcoords="offset points",
                    ha=side,
                    color=color,
                    fontweight="bold",
                )
    steps, values = metrics.series(SCORE)
    if steps:
        axes.plot(steps, values, color=ORANGE, linewidth=1.3, label="training score (kept groups)")
    _mark_not_finite(axes, steps, values)
    _finish(axes, bool(keys or steps), "lower right")
    drawn = [v for key in [*keys, SCORE] for v in metrics.series(key)[1] if math.isfinite(v)]
    axes.set_ylim(min([0.0, *drawn]) * 1.05, max([1.0, *drawn]) * 1.05)


def _draw_mismatch(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Mismatch KL, rollout to trainer (k3)", **TITLE)
    steps, values = metrics.series(MISMATCH_KL)
    positive = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v) and v > 0]
    axes.set_yscale("log")
    if positive:
        axes.plot(*zip(*positive, strict=True), ".-", color=VERMILION, linewidth=1.5, label="per step")
        axes.axhline(
            HEALTHY_KL, color="#666666", linestyle="--", linewidth=1, label=f"look closer above {HEALTHY_KL:g}"
        )
        low, high = min(v for _, v in positive), max(v for _, v in positive)
        axes.set_ylim(low / 5, max(high, HEALTHY_KL) * 5)
    _mark_not_finite(axes, steps, values)
    _finish(axes, bool(steps), "best")


def _draw_time(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Step time", **TITLE)
    axes.set_ylabel("seconds")
    steps, totals = metrics.series(STEP_TIME)
    rows = [metrics.rows[step] for step in steps]
    floor = [0.0] * len(steps)
    for name, (label, color) in PHASES.items():
        heights = [_finite(row.get(f"timing_s/{name}")) for row in rows]
        # Below a hundredth of the time a bar cannot be seen, and its legend would only take room.
        if sum(heights) > 0.01 * sum(map(_finite, totals)):
            axes.bar(steps, heights, bottom=floor, width=0.9, color=color, label=label)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
    rest = [max(0.0, _finite(total) - low) for total, low in zip(totals, floor, strict=True)]
    if sum(rest) > 0.01 * sum(map(_finite, totals)):
        axes.bar(steps, rest, bottom=floor, width=0.9, color=GREY, label="other")
    if steps:
        axes.set_ylim(0, 1.35 * max(map(_finite, totals)) or 1.0)  # room for the legend above the bars
    _mark_not_finite(axes, steps, totals)
    _finish(axes, bool(steps), "upper center")


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _mark_not_finite(axes: Axes, steps: list[int], values: list[float]) -> None:
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if bad:
        # x in data, y in axes coordinates: a NaN has no height.
        axes.plot(
            bad,
            [0.02] * len(bad),
            "x",
            color="black",
            transform=axes.get_xaxis_transform(),
            label="not finite",
        )


def _finish(axes: Axes, drawn: bool, where: str) -> None:
    if not drawn:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="#666666")
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(loc=where, fontsize=8, frameon=False, ncols=3 if where == "upper center" else 1)
