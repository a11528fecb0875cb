# SPDX-License-Identifier: Apache-2.0
"""The learning curves: mean of the seeds, and their range."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.config import Precision
from flashrl_verl.report import arms as drawn
from flashrl_verl.report.figure import new_figure
from flashrl_verl.report.palette import LINES, MARKERS, OF_PRECISION, Style
from flashrl_verl.report.panels import Kind, Panel, Section, panels
from flashrl_verl.report.pictures import Drawing, legend_above
from flashrl_verl.report.run import METRICS_FILE
from flashrl_verl.report.run import Report as RunReport

if TYPE_CHECKING:
    from flashrl_verl.bench.learning_report import Report

WORDS = {"none": "no correction", "tis": "TIS"}
SMOOTH = 5
"""Steps whose mean is drawn of the mismatch, which is noisy; accuracies are drawn as they are."""


def plot(report: Report, path: Path) -> bool:
    """Accuracy by step and by hours, mismatch by step; False where no run has validated yet.

    An arm's curve goes as far as all of its runs that have begun.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    arms = _arms(report)
    wanted = _panels(arms)
    if not wanted:
        return False
    figure, drawing = new_figure(4.9 * len(wanted), 4.4), Drawing(arms=arms, smooth=SMOOTH)
    every = figure.subplots(1, len(wanted), squeeze=False)[0]
    for axes, panel in zip(every, wanted, strict=True):
        drawing.draw(axes, panel)
    legend_above(figure, list(every))
    figure.savefig(path, dpi=150)
    return True


def _arms(report: Report) -> list[drawn.Arm]:
    """Colour by precision, line and marker by correction."""
    corrections = list(dict.fromkeys(arm.correction for arm in report.config.arms))
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
            found.append(
                drawn.Arm(
                    label=f"{arm.precision.value.upper()}, {WORDS.get(arm.correction, arm.correction)}", runs=runs, style=style
                )
            )
    return found


def _panels(arms: list[drawn.Arm]) -> list[Panel]:
    there, _ = panels(arms)
    learning = [panel for panel in there if panel.section is Section.LEARNING and panel.few]
    by_kind = [next((panel for panel in learning if panel.kind is kind), None) for kind in (Kind.OVER_STEPS, Kind.OVER_TIME)]
    mismatch = next((panel for panel in there if panel.name == "mismatch_kl"), None)
    return [panel for panel in (*by_kind, mismatch) if panel is not None]
