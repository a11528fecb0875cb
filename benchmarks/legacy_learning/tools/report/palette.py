# SPDX-License-Identifier: Apache-2.0
"""Colours, lines and markers that stay apart for the colour-blind and in grey."""

from __future__ import annotations

from dataclasses import dataclass

from flashrl_verl.settings import Precision

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color), black and yellow left out: yellow is faint on
# white.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#BBBBBB"
OF_PRECISION = {Precision.BF16: GREEN, Precision.INT8: BLUE, Precision.FP8: VERMILION}
"""Where colours mean precisions: in the pictures of the benchmarks."""
TITLE = {"loc": "left", "fontsize": 11, "fontweight": "bold"}

PHASES = {
    "gen": ("rollout", SKY),
    "reward": ("reward", PURPLE),
    "old_log_prob": ("old log-prob", ORANGE),
    "ref": ("reference log-prob", PURPLE),
    "values": ("critic's values", GREY),
    "adv": ("advantage", GREEN),
    "update_critic": ("critic update", "#999933"),
    "update_actor": ("actor update", BLUE),
    "update_weights": ("refit", VERMILION),
    "save_checkpoint": ("checkpoint", "#666666"),
}
"""Parts of a step in their order: verl's `timing_s/<name>` to label and colour. What is left of a step is
"other"."""

HEALTHY_KL = 1e-2
"""Mismatch KL that curves are read by: runs that learned were above it in two steps in a row at most, the one that fell
behind in twenty steps (docs/results/learning.md). The guard's alarm, `flashrl.guard.k3_kl_max`, is twice that: it is
not to go off because a run is the worst one yet."""

INK, FAINT = "#333333", "#E5E5E5"
"""Of words and outlines, and of grids."""

SHADES = {
    "gen": ("#00224E", ""),
    "reward": ("#9C9374", "..."),
    "old_log_prob": ("#DAC45F", "///"),
    "ref": ("#575D6D", ""),
    "values": ("#E1CC55", "|||"),
    "adv": ("#FFFFFF", ""),
    "update_critic": ("#A69D75", "\\\\\\"),
    "update_actor": ("#7D7C78", ""),
    "update_weights": ("#FEE838", "xxx"),
    "save_checkpoint": ("#3B496C", ""),
    "other": ("#BBBBBB", ""),
}
"""Fill and hatch of the parts of a step where colours already mean runs: cividis
(https://doi.org/10.1371/journal.pone.0199239), whose lightness tells its shades apart in grey."""

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


def ink_on(fill: str) -> str:
    """White or black, whichever stands out more from this ``#rrggbb``: at least 4.5 to 1, as WCAG 2 asks of small
    text."""
    return "#FFFFFF" if 1.05 / (luminance(fill) + 0.05) > (luminance(fill) + 0.05) / 0.05 else "#000000"


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (https://www.w3.org/TR/WCAG21/#dfn-relative-luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
