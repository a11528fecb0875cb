# SPDX-License-Identifier: Apache-2.0
"""The learning curves: mean of the seeds, and their range; and what the runs came to, asked in BF16.

Drawn from what ``learning.json`` has, so that a picture can be made anew from what is kept of its runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.legacy_learning.learning import Arm
from benchmarks.legacy_learning.learning_bf16 import SAMPLES
from benchmarks.legacy_learning.learning_results import SERIES, Estimate
from benchmarks.legacy_learning.learning_run import Status
from flashrl_verl.settings import Precision
from benchmarks.legacy_learning.tools.report import arms as drawn
from benchmarks.legacy_learning.tools.report.figure import new_figure, save
from benchmarks.legacy_learning.tools.report.metrics import STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.palette import LINES, MARKERS, OF_PRECISION, TITLE, Style
from benchmarks.legacy_learning.tools.report.panels import Kind, Panel, Section, panels
from benchmarks.legacy_learning.tools.report.pictures import Drawing, legend_above
from benchmarks.legacy_learning.tools.report.run import Report as RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {"none": "no correction", "tis": "TIS", "seq_tis": "sequence TIS"}
SMOOTH = 5
"""Steps whose mean is drawn of the mismatch, which is noisy; accuracies are drawn as they are."""
_HELD_OUT = "val-core/held-out/acc/mean@1"
"""Of a file that does not say how many samples a validation asks for."""


def plot(record: dict[str, Any], path: Path) -> bool:
    """Accuracy by step and by hours, mismatch by step, last weights in BF16; False where no run has validated yet.

    An arm's curve goes as far as all of its runs that have begun.

    Args:
        record: as ``learning.json`` has it (``learning_report.to_json``).
        path: .png or .svg.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    arms = _arms(record)
    wanted = _panels(arms)
    if not wanted:
        return False
    asked = any(run["bf16"] for run in record["runs"])
    columns = len(wanted) + asked
    drawing = Drawing(arms=arms, smooth=max(1, round(SMOOTH / _steps_a_point(record))))
    figure = new_figure(4.9 * columns, 4.4)
    every = figure.subplots(1, columns, squeeze=False)[0]
    for axes, panel in zip(every, wanted, strict=False):
        drawing.draw(axes, panel)
    if asked:
        _draw_final(every[-1], record, {arm.label: arm.style for arm in arms})
    legend_above(figure, list(every[: len(wanted)]))
    save(figure, path)
    return True


def _label(arm: Arm) -> str:
    return f"{arm.precision.value.upper()}, {WORDS.get(arm.correction, arm.correction)}"


def _draw_final(axes: Axes, record: dict[str, Any], styles: dict[str, Style]) -> None:
    """A point a seed; mean and interval beside them. No axis begins at 0 or at the start, from which all are far
    away."""
    axes.set_title("Last weights, asked in BF16", **TITLE)
    there = [result for result in record["arms"] if result["accuracy"] is not None]
    drawn_at = []
    for place, result in enumerate(there):
        look, found = styles[_label(_arm(result["arm"]))], Estimate(**result["accuracy"])
        values = [
            _accuracy(run["bf16"])
            for run in record["runs"]
            if run["arm"] == result["arm"] and run["status"] == Status.FINISHED.value and run["bf16"]
        ]
        axes.plot([place] * len(values), values, look.marker, color=look.colour, alpha=0.5, markersize=5)
        # Student's interval of a few seeds knows no bounds, an accuracy does.
        low, high = (min(max(end, 0.0), 1.0) for end in found.interval or (found.mean, found.mean))
        axes.errorbar(
            [place + 0.2],
            [found.mean],
            [[found.mean - low], [high - found.mean]],
            fmt=look.marker,
            color=look.colour,
            capsize=3,
        )
        drawn_at += [*values, low, high]
    if record["start"]:
        axes.set_title(f"start: {_accuracy(record['start']):.3f}", loc="right", fontsize=8, color="0.4")
    axes.set_xticks(range(len(there)), [result["arm"] for result in there], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("accuracy: runs (pale), mean and 95 % interval", fontsize=8)
    if drawn_at:
        room = max(0.005, 0.05 * (max(drawn_at) - min(drawn_at)))
        axes.set_ylim(min(drawn_at) - room, max(drawn_at) + room)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _accuracy(metrics: dict[str, Any]) -> float:
    return metrics[f"mean@{SAMPLES}"]["value"]


def _arm(name: str) -> Arm:
    """As ``str`` of it; not ``arms_of``, for which its correction has to be there still."""
    precision, _, correction = name.partition(":")
    return Arm(precision=Precision(precision), correction=correction)


def _steps_a_point(record: dict[str, Any]) -> int:
    return record.get("steps_a_point", 1)  # files of before have up to 100 steps


def _arms(record: dict[str, Any]) -> list[drawn.Arm]:
    """Colour by precision, line and marker by correction."""
    all_arms = [_arm(result["arm"]) for result in record["arms"]]
    others = dict.fromkeys(arm.correction for arm in all_arms if arm.correction not in WORDS)
    corrections = [*WORDS, *others]  # the same line in every picture, whichever arms it has
    found = []
    for arm in all_arms:
        runs = tuple(
            drawn.NamedRun(
                label=f"{arm} {run['seed']}", report=RunReport(metrics=metrics, run={}, metrics_path=Path(str(arm)))
            )
            for run in record["runs"]
            if run["arm"] == str(arm) and (metrics := _metrics(run, _steps_a_point(record))).rows
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


def _metrics(run: dict[str, Any], width: int) -> Metrics:
    """A run's series as its metrics file had them, or means over ``width`` steps."""
    rows: dict[int, dict[str, float]] = {}
    for name, key in {"accuracy": run.get("held_out") or _HELD_OUT, **SERIES}.items():
        for step, value in zip(run["series"][name]["step"], run["series"][name]["value"], strict=True):
            # Each of the steps took that long, so that the clock of a thinned series is that of the whole.
            before = width * ((step - 1) // width) if key == STEP_TIME else step - 1
            for at in range(before + 1, step + 1):
                rows.setdefault(at, {})[key] = math.nan if value is None else value
    return Metrics(rows=dict(sorted(rows.items())))


def _panels(arms: list[drawn.Arm]) -> list[Panel]:
    there, _ = panels(arms)
    learning = [panel for panel in there if panel.section is Section.LEARNING and panel.few]
    by_kind = [
        next((panel for panel in learning if panel.kind is kind), None) for kind in (Kind.OVER_STEPS, Kind.OVER_TIME)
    ]
    mismatch = next((panel for panel in there if panel.name == "mismatch_kl"), None)
    return [panel for panel in (*by_kind, mismatch) if panel is not None]
