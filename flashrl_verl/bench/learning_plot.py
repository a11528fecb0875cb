# SPDX-License-Identifier: Apache-2.0
"""The learning curves: mean of the seeds, and their range; and what the runs came to, asked in BF16."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.bench.learning import Arm
from flashrl_verl.bench.learning_results import accuracy_of
from flashrl_verl.config import Precision
from flashrl_verl.report import arms as drawn
from flashrl_verl.report.figure import new_figure, save
from flashrl_verl.report.palette import LINES, MARKERS, OF_PRECISION, TITLE, Style
from flashrl_verl.report.panels import Kind, Panel, Section, panels
from flashrl_verl.report.pictures import Drawing, legend_above
from flashrl_verl.report.run import METRICS_FILE
from flashrl_verl.report.run import Report as RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashrl_verl.bench.learning_results import Report

WORDS = {"none": "no correction", "tis": "TIS", "seq_tis": "sequence TIS"}
SMOOTH = 5
"""Steps whose mean is drawn of the mismatch, which is noisy; accuracies are drawn as they are."""


def plot(report: Report, path: Path) -> bool:
    """Accuracy by step and by hours, mismatch by step, last weights in BF16; False where no run has validated yet.

    An arm's curve goes as far as all of its runs that have begun.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    arms = _arms(report)
    wanted = _panels(arms)
    if not wanted:
        return False
    asked = any(run.bf16 for run in report.runs)
    columns = len(wanted) + asked
    figure, drawing = new_figure(4.9 * columns, 4.4), Drawing(arms=arms, smooth=SMOOTH)
    every = figure.subplots(1, columns, squeeze=False)[0]
    for axes, panel in zip(every, wanted, strict=False):
        drawing.draw(axes, panel)
    if asked:
        _draw_final(every[-1], report, {arm.label: arm.style for arm in arms})
    legend_above(figure, list(every[: len(wanted)]))
    save(figure, path)
    return True


def _label(arm: Arm) -> str:
    return f"{arm.precision.value.upper()}, {WORDS.get(arm.correction, arm.correction)}"


def _draw_final(axes: Axes, report: Report, styles: dict[str, Style]) -> None:
    """A point a seed; mean and interval beside them."""
    axes.set_title("Last weights, asked in BF16", **TITLE)
    there = [result for result in report.arms() if result.accuracy is not None]
    for place, result in enumerate(there):
        look, found = styles[_label(result.arm)], result.accuracy
        values = [run.final() for run in report.of(result.arm) if run.finished and run.bf16]
        axes.plot([place] * len(values), values, look.marker, color=look.colour, alpha=0.5, markersize=5)
        reach = [[abs(found.mean - end)] for end in found.interval or (found.mean, found.mean)]
        axes.errorbar([place + 0.2], [found.mean], reach, fmt=look.marker, color=look.colour, capsize=3)
    if report.start:
        axes.axhline(accuracy_of(report.start)["value"], color="0.5", linestyle=":", linewidth=1)
        axes.annotate("start", (0, accuracy_of(report.start)["value"]), color="0.4", fontsize=8, va="bottom")
    axes.set_xticks(range(len(there)), [str(result.arm) for result in there], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("accuracy; mean and 95 % interval over seeds", fontsize=8)
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.02))  # Student's interval of a few seeds knows no bounds, an accuracy does
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _arms(report: Report) -> list[drawn.Arm]:
    """Colour by precision, line and marker by correction."""
    others = dict.fromkeys(arm.correction for arm in report.config.arms if arm.correction not in WORDS)
    corrections = [*WORDS, *others]  # the same line in every picture, whichever arms it has
    found = []
    for arm in report.config.arms:
        runs = tuple(
            drawn.NamedRun(
                label=run.state.run.name,
                report=RunReport(metrics=run.metrics, run={}, metrics_path=run.state.run.folder / METRICS_FILE),
            )
            for run in report.of(arm)
            if run.metrics.rows
        )
        place = corrections.index(arm.correction)
        style = Style(
            colour=OF_PRECISION[arm.precision],
            line=LINES[place % len(LINES)],
            # Precisions differ in their markers too, for whoever sees no colours.
            marker=MARKERS[(3 * place + list(Precision).index(arm.precision)) % len(MARKERS)],
        )
        if runs:
            found.append(drawn.Arm(label=_label(arm), runs=runs, style=style))
    return found


def _panels(arms: list[drawn.Arm]) -> list[Panel]:
    there, _ = panels(arms)
    learning = [panel for panel in there if panel.section is Section.LEARNING and panel.few]
    by_kind = [next((panel for panel in learning if panel.kind is kind), None) for kind in (Kind.OVER_STEPS, Kind.OVER_TIME)]
    mismatch = next((panel for panel in there if panel.name == "mismatch_kl"), None)
    return [panel for panel in (*by_kind, mismatch) if panel is not None]
