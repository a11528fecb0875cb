# SPDX-License-Identifier: Apache-2.0
"""The panels of a comparison drawn by matplotlib, without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.legacy_learning.tools.report.arms import Arm, NamedRun, curve
from benchmarks.legacy_learning.tools.report.figure import new_figure, source
from benchmarks.legacy_learning.tools.report.palette import FAINT, INK, PHASES, SHADES, TITLE, ink_on
from benchmarks.legacy_learning.tools.report.panels import Kind, Panel, Section
from benchmarks.legacy_learning.tools.report.step_time import step_parts, updates_per_hour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 6.4, 3.6
"""Of a picture with one panel, inches."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What holds for all pictures of a report."""

    arms: Sequence[Arm]
    smooth: int = 1
    """Last logged values whose mean is drawn."""

    def picture(self, panel: Panel) -> bytes:
        """The panel alone, as SVG.

        Raises:
            FlashRLError: matplotlib is not installed.
        """
        return _saved(self.figure(panel), "svg")

    def figure(self, panel: Panel) -> Figure:
        """The panel alone, its legend above it."""
        bars = panel.kind is Kind.STEP_BARS
        runs = sum(len(arm.runs) for arm in self.arms)
        figure = new_figure(WIDTH, max(2.2, 1.3 + 0.42 * runs) if bars else HEIGHT + 0.16 * len(self.arms))
        axes = figure.subplots()
        self.draw(axes, panel)
        legend_above(figure, [axes])
        return figure

    def overview(self, panels: Sequence[Panel]) -> bytes | None:
        """`overview_figure` as PNG."""
        figure = self.overview_figure(panels)
        return _saved(figure, "png") if figure is not None else None

    def overview_figure(self, panels: Sequence[Panel]) -> Figure | None:
        """Learning curve and mismatch under it, by step and by time; accuracy against speed over the parts of a step.

        The layouts of FlashRL's figures 2 and 4 (https://fengyao.notion.site/flash-rl). None without a learning curve.
        """
        learning = [panel for panel in panels if panel.section is Section.LEARNING]
        above = [next((panel for panel in learning if panel.kind is kind), None) for kind in list(Kind)[:3]]
        by_name = {panel.name: panel for panel in panels}
        below = [
            by_name.get("mismatch_kl"),
            by_name.get("effective_sample_size") or by_name.get("correlation"),
            by_name.get("step_time"),
        ]
        if above[0] is None:
            return None
        columns = [(top, bottom) for top, bottom in zip(above, below, strict=True) if top or bottom]
        figure = new_figure(4.7 * len(columns), 6.6)
        grid = figure.subplots(2, len(columns), squeeze=False)
        for column, pair in enumerate(columns):
            for row, panel in enumerate(pair):
                if panel is None:
                    grid[row, column].set_axis_off()
                else:
                    self.draw(grid[row, column], panel)
        bars = [grid[1, i] for i, (_, bottom) in enumerate(columns) if bottom and bottom.kind is Kind.STEP_BARS]
        for axes in bars:
            axes.set_yticklabels([])  # the colours are in the legend; long names would take the room of the bars
            _mark_bars(axes, self.arms)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8, frameon=False)
        legend_above(figure, [axes for axes in grid.flat if axes not in bars])
        return figure

    def draw(self, axes: Axes, panel: Panel) -> None:
        """The panel in these axes; the legend is the figure's affair."""
        axes.set_title(panel.title, **TITLE)
        draw: Callable[[Axes, Panel], None] = {Kind.STEP_BARS: self._bars, Kind.AGAINST_SPEED: self._points}.get(
            panel.kind, self._lines
        )
        draw(axes, panel)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)

    def _lines(self, axes: Axes, panel: Panel) -> None:
        by_time = panel.kind is Kind.OVER_TIME
        unit, scale = self._time_unit() if by_time else ("training step", 1.0)
        smooth = 1 if panel.few else self.smooth
        if panel.log:
            axes.set_yscale("log")
        for i, arm in enumerate(self.arms):
            raw = curve(arm, panel.values, by_time)
            shown = curve(arm, panel.values, by_time, smooth)
            if not raw.x:
                continue
            x, look = [scale * value for value in raw.x], arm.style
            if smooth > 1:
                axes.plot(x, raw.y, color=look.colour, linewidth=0.8, alpha=0.3)
            if len(arm.runs) > 1:
                axes.fill_between(x, shown.low, shown.high, color=look.colour, alpha=0.15, linewidth=0)
            every = max(1, len(x) // 8)
            axes.plot(
                x,
                shown.y,
                color=look.colour,
                linestyle=look.line,
                marker=look.marker,
                markersize=5,
                linewidth=1.6,
                markevery=(0, 1)
                if panel.few
                else (i * every // max(1, len(self.arms)), every),  # apart from other arms'
                label=arm.label,
            )
            _mark_not_finite(axes, x, raw.y)
        if panel.limit is not None:
            _mark_limit(axes, panel.limit)
        axes.set_xlabel(unit)
        axes.set_ylabel(panel.quantity)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        if not by_time:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if not panel.log:
            axes.ticklabel_format(axis="y", useOffset=False)
            if not any(v for arm in self.arms for v in curve(arm, panel.values, False).y):
                axes.set_ylim(-0.05, 1.0)  # nothing but zeros: no scale of their own

    def _time_unit(self) -> tuple[str, float]:
        longest = max(
            (max(run.metrics.clock().values(), default=0.0) for arm in self.arms for run in arm.runs), default=0.0
        )
        return ("training time, hours", 1.0) if longest >= 1 else ("training time, minutes", 60.0)

    def _points(self, axes: Axes, panel: Panel) -> None:
        for arm in self.arms:
            points = []
            for run in arm.runs:
                values, speed = panel.values(run.metrics)[1], updates_per_hour(run.metrics)
                if values and speed is not None:
                    points.append((speed, values[-1]))
            if points:
                x, y = zip(*points, strict=True)
                look = arm.style
                axes.plot(
                    x,
                    y,
                    linestyle="none",
                    marker=look.marker,
                    markersize=9,
                    color=look.colour,
                    label=arm.label,
                    clip_on=False,
                )
        axes.margins(0.15)
        axes.set_xlabel("updates per hour")
        axes.set_ylabel(panel.quantity)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.ticklabel_format(useOffset=False)

    def _bars(self, axes: Axes, panel: Panel) -> None:
        runs = [run for arm in self.arms for run in arm.runs]
        keep = _worth_a_bar(runs)
        parts = [merge_small(step_parts(run.metrics), keep) for run in runs]
        left, longest = [0.0] * len(runs), max(sum(run.values()) for run in parts)
        labels = list(dict.fromkeys(label for run in parts for label in run if label != "other"))
        shades = {label: SHADES[phase] for phase, (label, _) in PHASES.items()} | {"other": SHADES["other"]}
        for label in [*labels, "other"]:
            widths, (fill, hatch) = [run.get(label, 0.0) for run in parts], shades[label]
            axes.barh(
                range(len(runs)),
                widths,
                left=left,
                height=0.62,
                color=fill,
                edgecolor=INK,
                linewidth=0.5,
                hatch=hatch,
                label=label,
            )
            for y, width in enumerate(widths):
                if width > 0.08 * longest:  # else its percentage would be wider than the part
                    where, share = left[y] + width / 2, width / sum(parts[y].values())
                    box = {"facecolor": fill, "edgecolor": "none", "pad": 1.5}  # over a hatch no figure could be read
                    axes.text(
                        where, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color=ink_on(fill), bbox=box
                    )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, total in enumerate(left):
            text = f" {total:.3g} s" if total else " not logged"
            axes.text(total, y, text, va="center", fontsize=8, color=INK)
        axes.set_yticks(range(len(runs)), [run.label for run in runs])
        axes.set_ylim(len(runs) - 0.5, -0.5)  # the first run on top
        axes.set_xlim(0, 1.15 * longest or 1.0)
        axes.set_xlabel(Kind.STEP_BARS.value)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)


def merge_small(parts: dict[str, float], keep: set[str]) -> dict[str, float]:
    """The parts of a step with those not in `keep` added to `other`."""
    kept = {label: seconds for label, seconds in parts.items() if label in keep}
    return {**kept, "other": sum(parts.values()) - sum(kept.values())} if parts else {}


def _worth_a_bar(runs: Sequence[NamedRun]) -> set[str]:
    """Parts that are at least a hundredth of a step in one of the runs: thinner ones cannot be seen."""
    worth = set()
    for run in runs:
        parts = step_parts(run.metrics)
        worth |= {
            label for label, seconds in parts.items() if label != "other" and seconds >= 0.01 * sum(parts.values())
        }
    return worth


def _mark_bars(axes: Axes, arms: Sequence[Arm]) -> None:
    """The runs' own markers before their bars, where there is no room for their names."""
    y = 0
    for arm in arms:
        for _ in arm.runs:
            axes.plot(
                [-0.03],
                [y],
                arm.style.marker,
                color=arm.style.colour,
                transform=axes.get_yaxis_transform(),
                clip_on=False,
            )
            y += 1
    axes.tick_params(axis="y", length=0)


def _mark_limit(axes: Axes, limit: float) -> None:
    low, high = axes.get_ylim()
    if high > limit / 10:  # far below it, the line would only squeeze the curves
        axes.axhline(limit, color="#666666", linestyle=(0, (1, 1)), linewidth=1, label=f"look closer above {limit:g}")
        axes.set_ylim(low, max(high, 2 * limit))


def _mark_not_finite(axes: Axes, x: list[float], y: list[float]) -> None:
    bad = [place for place, value in zip(x, y, strict=True) if not math.isfinite(value)]
    if bad:
        # x in data, y in axes coordinates: a NaN has no height.
        axes.plot(bad, [0.02] * len(bad), "x", color=INK, transform=axes.get_xaxis_transform(), label="not finite")


def legend_above(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all axes, outside of them: it covers no data."""
    told = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            told.setdefault(label, handle)
    if not told:
        return
    room = figure.get_figwidth() * 13  # letters of this size in a line, about
    columns = max(1, min(len(told), int(room // (max(map(len, told)) + 8))))
    figure.legend(
        told.values(),
        told.keys(),
        loc="outside upper center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )


def _saved(figure: Figure, form: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # The same data give the same bytes: no date, and names inside the SVG that are not random.
    with matplotlib.rc_context({"svg.hashsalt": "flashrl"}):
        undated = {"Date": None} if form == "svg" else {}
        figure.savefig(buffer, format=form, dpi=120, metadata={"Source": source(figure)} | undated)
    return buffer.getvalue()
