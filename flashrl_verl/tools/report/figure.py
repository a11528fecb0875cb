# SPDX-License-Identifier: Apache-2.0
"""An empty figure for every picture of this repository, drawn without a display, and its file."""

from __future__ import annotations

from pathlib import Path
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


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a picture, .png or .svg, without a date: the same data gives the same file.

    Raises:
        OSError: no space, no rights, ...
    """
    figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
