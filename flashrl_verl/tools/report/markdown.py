# SPDX-License-Identifier: Apache-2.0
"""A comparison as Markdown, with its pictures beside it."""

from __future__ import annotations

from flashrl_verl.tools.report.comparison import OVERVIEW_FILE, PICTURES, Comparison
from flashrl_verl.tools.report.costs import CAPTION
from flashrl_verl.tools.report.costs import TITLE as COSTS
from flashrl_verl.tools.report.run import fenced
from flashrl_verl.tools.report.summary import Summary


def render(comparison: Comparison) -> str:
    """The text of `report.md`; pictures are in the folder `pictures`."""
    parts = [
        "# FlashRL runs compared",
        _table(comparison.summary),
        "\n".join(f"- {_plain(note)}" for note in comparison.notes),
    ]
    if comparison.overview is not None:
        parts.append(f"![{comparison.overview_alt()}]({OVERVIEW_FILE})")
    for title, pictures in comparison.sections():
        parts.append(f"## {title}")
        for picture in pictures:
            file = f"{PICTURES}/{picture.panel.name}.svg"
            parts += [f"![{_plain(picture.alt)}]({file})", _plain(picture.caption)]
    if comparison.costs is not None:
        parts += [f"## {COSTS}", _table(comparison.costs), CAPTION]
    parts += [comparison.absent_line(), "## Runs"]
    for run in comparison.runs:
        facts = [f"- {_plain(label)}: {_code(text)}" for label, text in run.report.facts()]
        parts.append("\n".join([f"### {_plain(run.label)}", "", *facts]))
        if command := run.report.command():
            parts.append(fenced(command))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(summary: Summary) -> str:
    return "\n".join([_row(summary.header), "|" + "---|" * len(summary.header), *map(_row, summary.rows)])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Text that Markdown takes as it is: no cell ends early, no name becomes a link, emphasis or a tag."""
    for mark in "\\`*_[]<|":
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`" if "`" not in text else _plain(text)
