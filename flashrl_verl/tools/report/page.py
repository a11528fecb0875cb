# SPDX-License-Identifier: Apache-2.0
"""The report's files: five curves in one picture, and a Markdown page that shows it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.report.metrics import HELD_OUT, MISMATCH_KL, SCORE
from flashrl_verl.tools.report.palette import BLUE, FAINT, GREEN, HEALTHY_KL, INK, ORANGE, PURPLE, SKY, TITLE, VERMILION
from flashrl_verl.tools.report.runs import ESS, PHASES, Report, Run
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE, CURVES_FILE = "report.md", "curves.png"

COLOURS, LINES = (BLUE, VERMILION, GREEN, "#000000", PURPLE, ORANGE, SKY), ("-", "--", "-.", ":")
"""Of the groups; 7 and 4 have no common factor, so 28 groups differ."""

NOTES = """\
Held-out accuracy is asked of prompts that were never trained on. The training score is of the groups that dynamic
sampling kept, neither all right nor all wrong, so it stays near the middle while the policy improves. Mismatch KL
compares the rollout's probabilities with the trainer's for the sampled tokens: look closer above 0.01. ESS is the
effective sample size of the importance weights, as a share. Seconds of a step leave the first out."""


def write(report: Report, folder: Path | None = None) -> list[Path]:
    """Write `report.md` and `curves.png`; returns their paths.

    Args:
        report: what to write.
        folder: where; by default beside the metrics of the only run.

    Raises:
        FlashRLError: matplotlib is missing; `report.md` is there.
    """
    folder = report.runs[0].path.parent if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REPORT_FILE, _markdown(report).encode())
    write_whole(folder / CURVES_FILE, draw(report))
    return [folder / name for name in (REPORT_FILE, CURVES_FILE)]


# ---- words ----


def _facts(run: Run) -> str:
    """Where a run is from, a line each."""
    lines = [f"metrics: {run.path}"]
    for key in ("hardware", "seed", "versions", "command"):
        if key in run.facts:
            value = run.facts[key]
            lines.append(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def _markdown(report: Report) -> str:
    lines = [["", *report.groups], ["---"] * (1 + len(report.groups))]
    lines += [[label, *cells] for label, cells in report.rows()]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    parts = ["# FlashRL runs", table, f"![Curves of every run]({CURVES_FILE})", NOTES, "## Runs"]
    for name, runs in report.groups.items():
        parts += [f"### {name}", *("\n".join(f"    {line}" for line in _facts(run).splitlines()) for run in runs)]
    return "\n\n".join(parts) + "\n"


# ---- curves ----


def draw(report: Report) -> bytes:
    """The five plots as one PNG: score, mismatch, correction, response length (else entropy), seconds of a step.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    try:
        # The object interface: pyplot would choose a backend for the whole process.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlashRLError(f"no picture can be drawn: {error}. Remedy: pip install 'matplotlib>=3.8'.") from error
    figure = Figure(figsize=(15, 8), layout="constrained")
    (score, mismatch, correction), (length, seconds, legend) = figure.subplots(2, 3)
    keys = sorted({key for run in report.runs for key in run.metrics.keys(HELD_OUT)})
    if keys:
        _lines(score, f"Held-out score, {HELD_OUT.fullmatch(keys[0])['source']} (thin: training)", report, keys[0], "o")
        _lines(score, None, report, SCORE, faint=True)
    else:
        _lines(score, "Training score", report, SCORE)
    _lines(mismatch, "Mismatch KL (k3); dotted: look closer above", report, MISMATCH_KL)
    if mismatch.lines:
        mismatch.set_yscale("log", nonpositive="mask")
        mismatch.axhline(HEALTHY_KL, color=INK, linestyle=":", linewidth=1)
    _lines(correction, "Effective sample size of the weights (share)", report, ESS)
    if any("response_length/mean" in row for run in report.runs for row in run.metrics.rows.values()):
        _lines(length, "Response length, tokens", report, "response_length/mean")
    else:
        _lines(length, "Entropy", report, "actor/entropy")
    _bars(seconds, report)
    legend.set_axis_off()
    for index, (name, runs) in enumerate(report.groups.items()):
        label = name if len(runs) == 1 else f"{name} (mean and range of {len(runs)})"
        legend.plot([], [], **_style(index), linewidth=2, label=label)
    legend.legend(loc="upper left", frameon=False, fontsize=10 if len(report.groups) < 16 else 7)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    return buffer.getvalue()


def _style(index: int) -> dict[str, str]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def _lines(axes: Axes, title: str | None, report: Report, key: str, marker: str = "", faint: bool = False) -> None:
    """One line a group: a run's values, or the mean and the range of several at the steps that all of them logged."""
    look = {"linewidth": 0.8, "alpha": 0.5} if faint else {"linewidth": 1.6, "marker": marker, "markersize": 4}
    for index, runs in enumerate(report.groups.values()):
        steps, columns = common(runs, key)
        if not steps:
            continue
        style = _style(index)
        axes.plot(steps, [fmean(column) for column in columns], **style, **look)
        if len(runs) > 1 and not faint:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        lost = [step for step, column in zip(steps, columns, strict=True) if not all(map(math.isfinite, column))]
        if lost:  # x in data, y in axes coordinates: a NaN has no height
            place = axes.get_xaxis_transform()
            axes.plot(lost, [0.02] * len(lost), "x", color=style["color"], transform=place, label="not finite")
            axes.legend(frameon=False)
    if title is None:
        return
    _frame(axes, title, drawn=bool(axes.lines))
    axes.set_xlabel("training step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y", color=FAINT)


def common(runs: Sequence[Run], key: str) -> tuple[list[int], list[list[float]]]:
    """Steps at which every run that logged `key` has a value, and those values."""
    series = [dict(zip(*run.metrics.series(key), strict=True)) for run in runs]
    series = [by_step for by_step in series if by_step]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    return steps, [[by_step[step] for by_step in series] for step in steps]


def _bars(axes: Axes, report: Report) -> None:
    timed = {name: [p for run in runs if (p := run.phases())] for name, runs in report.groups.items()}
    timed = {name: phases for name, phases in timed.items() if phases}
    left = [0.0] * len(timed)
    for label, colour in PHASES.values():
        width = [fmean(phases.get(label, 0.0) for phases in them) for them in timed.values()]
        if any(width):
            axes.barh(range(len(timed)), width, left=left, height=0.7, color=colour, label=label)
            left = [start + more for start, more in zip(left, width, strict=True)]
    _frame(axes, "Seconds of a step by phase, mean", drawn=bool(timed))
    axes.set_yticks(range(len(timed)), [name if len(name) < 32 else f"{name[:30]}..." for name in timed], fontsize=8)
    axes.invert_yaxis()
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False, fontsize=9)


def _frame(axes: Axes, title: str, *, drawn: bool) -> None:
    axes.set_title(title, **TITLE)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=INK)
