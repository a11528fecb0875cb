# SPDX-License-Identifier: Apache-2.0
"""Colours, lines and markers that stay apart for the colour-blind and in grey."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color), black and yellow left out: yellow is faint on
# white.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#BBBBBB"
TITLE = {"loc": "left", "fontsize": 11, "fontweight": "bold"}

PHASES = {
    "gen": ("rollout", SKY),
    "reward": ("reward", PURPLE),
    "old_log_prob": ("old log-prob", ORANGE),
    "ref": ("reference log-prob", PURPLE),
    "adv": ("advantage", GREEN),
    "update_actor": ("actor update", BLUE),
    "update_weights": ("refit", VERMILION),
    "save_checkpoint": ("checkpoint", "#666666"),
}
"""Parts of a step in their order: verl's `timing_s/<name>` to label and colour. What is left of a step is
"other"."""

HEALTHY_KL = 1e-2
"""Mismatch KL above which a rollout no longer samples the trainer's policy, for all that runs so far have
shown."""

SHADES = {
    "gen": ("#00224E", ""),
    "reward": ("#9C9374", "..."),
    "old_log_prob": ("#DAC45F", "///"),
    "ref": ("#575D6D", ""),
    "adv": ("#FFFFFF", ""),
    "update_actor": ("#7D7C78", ""),
    "update_weights": ("#FEE838", "xxx"),
    "save_checkpoint": ("#3B496C", ""),
    "other": ("#BBBBBB", ""),
}
"""Fill and hatch of the parts of a step where colours already mean runs: cividis (https://doi.org/10.1371/journal.pone.0199239),
whose lightness tells its shades apart in grey."""

COLOURS = (BLUE, VERMILION, GREEN, "#000000", PURPLE, ORANGE, SKY)
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = {"-": "", "--": "7 4", "-.": "9 3 2 3", ":": "2 3"}
"""`stroke-dasharray` of SVG that looks like matplotlib's line."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one arm is drawn, in every picture."""

    colour: str
    line: str
    marker: str


DISTINCT = len(LINES) * len(MARKERS)
"""Arms that differ in line or marker, so in grey too."""


def style(index: int) -> Style:
    """The style of the `index`-th arm, from 0; those of the first `DISTINCT` arms differ without their colours."""
    return Style(
        colour=COLOURS[index % len(COLOURS)],
        line=LINES[index % len(LINES)],
        marker=MARKERS[index % len(MARKERS)],  # 4 and 7 have no common factor: every pair occurs before one repeats
    )
