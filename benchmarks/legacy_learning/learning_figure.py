# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench learning-figure``: the curves of `flashrl bench learning` drawn anew from its ``learning.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flashrl_verl.errors import ConfigError
from benchmarks.legacy_learning.tools.console import new_console


def learning_figure(
    results: Annotated[
        Path, typer.Argument(metavar="FOLDER_OR_JSON", help="Output of flashrl bench learning, or its learning.json.")
    ],
    output: Annotated[Path, typer.Option(help="The picture, .png or .svg.")] = Path("outputs/learning.png"),
) -> None:
    """Draw the curves of `flashrl bench learning` from its learning.json alone, without its runs.

    Of runs of more than a hundred steps it has means over a few steps each, and so has the picture.
    """
    from benchmarks.legacy_learning.learning_plot import plot
    from benchmarks.legacy_learning.learning_report import DATA_FILE
    from benchmarks.legacy_learning.tools.report.figure import require_picture

    output = output.expanduser()
    file = results / DATA_FILE if results.is_dir() else results
    require_picture("--output", output)
    try:
        there = plot(json.loads(file.read_text()), output)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no learning.json of flashrl bench learning ({type(error).__name__}: {error}). Name its --output"
        ) from error
    if not there:
        raise ConfigError(
            f"{file} has no run that has validated: there is nothing to draw. The same bench command goes on"
        )
    new_console().print(f"written: {output}", highlight=False, soft_wrap=True)
