# SPDX-License-Identifier: Apache-2.0
"""The learning curves: mean of the seeds, and their range; and what the runs came to, asked in BF16.

Drawn from ``learning.json`` alone, so that a picture can be made anew from what is kept of its runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.bench.learning import Arm
from flashrl_verl.bench.learning_results import SERIES, Estimate
from flashrl_verl.config import Precision
from flashrl_verl.report import arms as drawn
from flashrl_verl.report.figure import new_figure, save
from flashrl_verl.report.metrics import STEP_TIME, Metrics
from flashrl_verl.report.palette import LINES, MARKERS, OF_PRECISION, TITLE, Style
from flashrl_verl.report.panels import Kind, Panel, Section, panels
from flashrl_verl.report.pictures import Drawing, legend_above
from flashrl_verl.report.run import Report as RunReport

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
    figure, drawing = new_figure(4.9 * columns, 4.4), Drawing(arms=arms, smooth=SMOOTH)
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
    """A point a seed; mean and interval beside them, which may reach out of the picture: the runs choose its scale."""
    axes.set_title("Last weights, asked in BF16", **TITLE)
    there = [result for result in record["arms"] if result["accuracy"] is not None]
    ends = []
    for place, result in enumerate(there):
        look, found = styles[_label(_arm(result["arm"]))], Estimate(**result["accuracy"])
        values = [
            _accuracy(run["bf16"])
            for run in record["runs"]
            if run["arm"] == result["arm"] and run["status"] == "finished" and run["bf16"]
        ]
        ends += values
        axes.plot([place] * len(values), values, look.marker, color=look.colour, alpha=0.5, markersize=5)
        reach = [[abs(found.mean - end)] for end in found.interval or (found.mean, found.mean)]
        axes.errorbar([place + 0.2], [found.mean], reach, fmt=look.marker, color=look.colour, capsize=3)
    if record["start"]:
        axes.set_title(f"start: {_accuracy(record['start']):.3f}", loc="right", fontsize=8, color="0.4")
    axes.set_xticks(range(len(there)), [result["arm"] for result in there], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("accuracy: runs (pale), mean and 95 % interval", fontsize=8)
    if ends:
        room = max(0.01, 0.4 * (max(ends) - min(ends)))
        axes.set_ylim(min(ends) - room, min(max(ends) + room, 1.02))
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _accuracy(metrics: dict[str, Any]) -> float:
    """Share of right answers; pass@k is beside it."""
    return next(found["value"] for name, found in metrics.items() if name.startswith("mean@"))


def _arm(name: str) -> Arm:
    precision, _, correction = name.partition(":")
    return Arm(precision=Precision(precision), correction=correction)


def _arms(record: dict[str, Any]) -> list[drawn.Arm]:
    """Colour by precision, line and marker by correction."""
    all_arms = [_arm(result["arm"]) for result in record["arms"]]
    others = dict.fromkeys(arm.correction for arm in all_arms if arm.correction not in WORDS)
    corrections = [*WORDS, *others]  # the same line in every picture, whichever arms it has
    found = []
    for arm in all_arms:
        runs = tuple(
            drawn.NamedRun(label=f"{arm} {run['seed']}", report=RunReport(metrics=metrics, run={}, metrics_path=Path(str(arm))))
            for run in record["runs"]
            if run["arm"] == str(arm) and (metrics := _metrics(run)).rows
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


def _metrics(run: dict[str, Any]) -> Metrics:
    """A run's series as its metrics file had them; a long one has means of neighbours, each at the last of its steps."""
    rows: dict[int, dict[str, float]] = {}
    for name, key in {"accuracy": run.get("held_out") or _HELD_OUT, **SERIES}.items():
        before = 0
        for step, value in zip(run["series"][name]["step"], run["series"][name]["value"], strict=True):
            # Every step takes time, so that the sum of a thinned series is that of the whole.
            for at in range(before + 1, step + 1) if key == STEP_TIME else (step,):
                rows.setdefault(at, {})[key] = math.nan if value is None else value
            before = step
    return Metrics(rows=dict(sorted(rows.items())))


def _panels(arms: list[drawn.Arm]) -> list[Panel]:
    there, _ = panels(arms)
    learning = [panel for panel in there if panel.section is Section.LEARNING and panel.few]
    by_kind = [next((panel for panel in learning if panel.kind is kind), None) for kind in (Kind.OVER_STEPS, Kind.OVER_TIME)]
    mismatch = next((panel for panel in there if panel.name == "mismatch_kl"), None)
    return [panel for panel in (*by_kind, mismatch) if panel is not None]
