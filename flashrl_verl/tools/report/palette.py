# SPDX-License-Identifier: Apache-2.0
"""Colours that the colour-blind can tell apart: Okabe and Ito's (https://jfly.uni-koeln.de/color), without yellow."""

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, INK, FAINT = "#BBBBBB", "#333333", "#E5E5E5"
"""Of what is left, of words and outlines, of grids."""
TITLE = {"loc": "left", "fontsize": 11, "fontweight": "bold"}

HEALTHY_KL = 1e-2
"""Mismatch KL (k3) above which to look closer: synchronous runs that learned were above it in three steps in a row at
most (docs/results/learning.md). The guard's alarm, `flashrl.guard.k3_kl_max`, is twice that."""
