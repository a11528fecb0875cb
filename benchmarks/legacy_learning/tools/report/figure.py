# SPDX-License-Identifier: Apache-2.0
"""An empty figure for every picture of this package, drawn without a display; and its file, which says what is drawn in
it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import ConfigError, FlashRLError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def require_picture(option: str, path: Path) -> None:
    """Refuse a picture that could not be written, before anything is drawn; its folder is made.

    Raises:
        ConfigError: the name ends in neither .png nor .svg, it is a folder's, or its folder cannot be made.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"{option} {path}: it ends in neither .png nor .svg")
    try:
        if path.expanduser().is_dir():
            raise ConfigError(f"{option} {path} is a folder: name a file in it")
        path.expanduser().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a picture with the SHA-256 of what is drawn in it as its `Source`: one of other data can be told from its
    file.

    Args:
        figure: to be written.
        path: .png or .svg.
        dpi: dots an inch, of a .png.

    Raises:
        OSError: no space, no rights, ...
    """
    figure.savefig(path, dpi=dpi, metadata={"Source": source(figure)})


def source(figure: Figure) -> str:
    """SHA-256 of words, numbers and colours in a figure of its size, which chooses the ticks; not of fonts and line
    widths."""
    drawn = [list(_drawn(axes)) for axes in figure.axes]
    around = [*(text.get_text() for text in figure.texts), *_words(figure.legends)]
    return hashlib.sha256(json.dumps([drawn, around]).encode()).hexdigest()


def _drawn(axes: Axes) -> Iterator[Any]:
    yield [axes.get_title(loc) for loc in ("left", "center", "right")] + [axes.get_xlabel(), axes.get_ylabel()]
    yield [tick.get_text() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels()]
    yield [[text.get_text(), _numbers([getattr(text, "xy", text.get_position())])] for text in axes.texts]
    yield _words([axes.get_legend()])
    for line in axes.lines:
        look = [line.get_label(), str(line.get_color()), line.get_linestyle(), str(line.get_marker())]
        yield [look, _numbers(line.get_xydata())]
    for patch in axes.patches:
        shape = patch.get_patch_transform().transform(patch.get_path().vertices)
        yield [str(patch.get_facecolor()), patch.get_hatch(), _numbers(shape)]
    for many in axes.collections:
        shapes = [_numbers(path.vertices) for path in many.get_paths()]
        yield [_numbers(many.get_facecolor()), shapes, _numbers(many.get_offsets())]


def _words(legends: list[Any]) -> list[str]:
    return [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]


def _numbers(array: Any) -> list[list[str]]:
    """Six digits, which a picture does not show."""
    return [[f"{number:.6g}" for number in row] for row in array]
