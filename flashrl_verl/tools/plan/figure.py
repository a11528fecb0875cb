# SPDX-License-Identifier: Apache-2.0
"""The picture of ``flashrl plan --figure``: a whole step of RL by part, for every choice of formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import BLUE, GREEN, GREY, INK, ORANGE, TITLE, ink_on

if TYPE_CHECKING:
    from flashrl_verl.tools.plan.planner import Plan

PARTS = {"rollout": BLUE, "log_probs": GREEN, "update": ORANGE, "refit": GREY}
_WORDS = {"log_probs": "old log-probs", "update": "policy update", "refit": "weight update"}

_ROOM = 0.05
"""Share of the longest step that a number in a part needs."""


def draw(plan: Plan, path: Path) -> None:
    """Write the picture.

    Args:
        plan: with BF16 among what is possible, or without.
        path: .png or .svg.

    Raises:
        FlashRLError: matplotlib is not installed.
        OSError: no space, no rights, ...
    """
    able = [outcome for outcome in plan.outcomes if outcome.whole is not None]
    longest = max(outcome.whole.seconds for outcome in able)
    figure = new_figure(9, 1.6 + 0.45 * len(able))
    axes = figure.subplots()
    for at, outcome in enumerate(able):
        left = 0.0
        for part, colour in PARTS.items():
            seconds = getattr(outcome.whole, part)
            label = _WORDS.get(part, part)
            axes.barh(at, seconds, left=left, height=0.6, color=colour, edgecolor=INK, linewidth=0.6, label=label)
            if seconds >= _ROOM * longest:
                axes.text(
                    left + seconds / 2, at, f"{seconds:.0f}", ha="center", va="center", fontsize=8, color=ink_on(colour)
                )
            left += seconds
        axes.text(left + 0.01 * longest, at, f"{3600 / left:.3g} an hour", va="center", fontsize=8)
    axes.set_yticks(range(len(able)), [str(outcome.choice) for outcome in able], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * longest)
    axes.set_xlabel("seconds of a step, computed", fontsize=8)
    work = f"{plan.sequences} x ({plan.work.prompt} -> {plan.work.response})"
    axes.set_title(f"{Path(plan.model).name} on {plan.gpus} x {plan.gpu.name}, {work}", **TITLE)
    axes.spines[["top", "right"]].set_visible(False)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save(figure, path)
