# SPDX-License-Identifier: Apache-2.0
"""The picture of decode steps that ``flashrl bench rollout`` recorded: kernels by class, beside the byte floor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rollout import Report, RolloutConfig
from benchmarks.rollout_report import words
from benchmarks.rollout_steps import BETWEEN, Step, steps
from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, TITLE, VERMILION, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REST = "the rest"

_SMALL = 0.015
"""Share of the longest step; a class below it in all steps is part of the rest."""

_ROOM = 0.05
"""Share of the longest step that the words in a part need."""

_COLOURS = {
    "attention": BLUE,
    "linear layers": ORANGE,
    "experts": VERMILION,
    "activation quantization": GREEN,
    "norms, rope, activation": SKY,
    "communication": PURPLE,
    REST: "#E8E8E8",
    BETWEEN: "#FFFFFF",
}
"""Others, which are small, are the rest or a darker grey."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One step as it is drawn, in milliseconds."""

    name: str
    parts: dict[str, float]
    floor: float | None


def bars(config: RolloutConfig, report: Report) -> list[Bar]:
    """Of every step whose whole is known: its parts, which make the whole, longest class first; small ones are one."""
    found = [step for step in steps(config, report) if step.whole is not None]
    longest = max((step.whole for step in found), default=0.0)
    peaks = {name: max(step.kernels[name] for step in found) for name in (found[0].kernels if found else {})}
    shown = sorted((name for name in peaks if peaks[name] >= _SMALL * longest), key=lambda name: -peaks[name])
    return [Bar(name=f"{words(step.work)}, {step.arm}", parts=_parts(step, shown), floor=step.floor) for step in found]


def _parts(step: Step, shown: list[str]) -> dict[str, float]:
    rest = sum(time for name, time in step.kernels.items() if name not in shown)
    # Kernels can overlap, and those of the recorded steps be slower than the mean step: then nothing is left between
    # them.
    return {name: step.kernels[name] for name in shown} | {REST: rest, BETWEEN: max(0.0, step.between)}


def write(config: RolloutConfig, report: Report) -> list[Path]:
    """Write ``steps.png``; returns its path, or nothing where no step was recorded.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    found = bars(config, report)
    if not found:
        return []
    picture = config.output / "steps.png"
    _plot(found, f"{config.model}, {report.environment['device']}", picture)
    return [picture]


def _plot(found: list[Bar], where: str, path: Path) -> None:
    figure = new_figure(9, 1.6 + 0.55 * len(found))
    axes = figure.subplots()
    room = _ROOM * max(sum(bar.parts.values()) for bar in found)
    for at, bar in enumerate(found):
        _draw(axes, at, bar, room)
    axes.set_yticks(range(len(found)), [bar.name for bar in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a decode step")
    axes.set_title("A decode step by class of kernel", **TITLE)
    figure.suptitle(where, fontsize=9, x=0.01, ha="left", color="#666666")
    axes.spines[["top", "right"]].set_visible(False)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save(figure, path)


def _draw(axes: Axes, at: int, bar: Bar, room: float) -> None:
    left = 0.0
    for name, time in bar.parts.items():
        colour = _COLOURS.get(name, GREY)
        axes.barh(at, time, left=left, height=0.6, color=colour, edgecolor=INK, linewidth=0.6, label=name)
        if time >= room:
            # A number tells the parts apart without colours too: they stand in the order of the legend.
            at_left = {
                "xytext": (4, 0),
                "textcoords": "offset points",
                "va": "center",
                "fontsize": 8,
            }  # off the floor's line
            axes.annotate(f"{time:.1f}", (left, at), color=ink_on(colour), **at_left)
        left += time
    if bar.floor is not None:
        label = "to read weights, keys and values once, at a copy's speed"
        axes.plot([bar.floor] * 2, [at - 0.42, at + 0.42], color="#000000", linewidth=2.5, label=label)
