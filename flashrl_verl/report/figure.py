# SPDX-License-Identifier: Apache-2.0
"""An empty figure for every picture of this package, drawn without a display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrl_verl.errors import FlashRLError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches; matplotlib is imported here, so that the modules that draw stay light.

    Raises:
        FlashRLError: matplotlib is not installed.
    """
    try:
        # The object interface: pyplot would choose a backend for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlashRLError(f"no picture can be drawn: {error}. Remedy: pip install 'matplotlib>=3.8'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
