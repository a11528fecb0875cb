# SPDX-License-Identifier: Apache-2.0
"""Any number of runs side by side: the parts of the report, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.tools.report.arms import Arm, NamedRun, load_arms
from flashrl_verl.tools.report.captions import alt_text, incomplete_means
from flashrl_verl.tools.report.costs import costs
from flashrl_verl.tools.report.metrics import IS_WEIGHTS, MISMATCH_KL
from flashrl_verl.tools.report.palette import DISTINCT
from flashrl_verl.tools.report.panels import Panel, Section, panels
from flashrl_verl.tools.report.pictures import Drawing
from flashrl_verl.tools.report.summary import Summary, summarize

if TYPE_CHECKING:
    from rich.table import Table

PAGE_FILE, PICTURES, OVERVIEW_FILE = "report.html", "pictures", "overview.png"
SECOND_FILE = "report.md"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawn panel."""

    panel: Panel
    caption: str
    """The panel's, and of which runs its means are where that are not all."""
    alt: str
    svg: bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `page.py` and `markdown.py` write, each in its own form."""

    arms: list[Arm]
    panels: list[Panel]
    absent: list[str]
    """Titles of the panels that no run has data for."""
    smooth: int

    @property
    def runs(self) -> list[NamedRun]:
        """Every run, those of an arm together."""
        return [run for arm in self.arms for run in arm.runs]

    @cached_property
    def summary(self) -> Summary:
        """The table."""
        return summarize(self.arms)

    @cached_property
    def costs(self) -> Summary | None:
        """The second table: time and memory, by part; None where no run logged them."""
        return costs(self.arms)

    @cached_property
    def pictures(self) -> list[Picture]:
        """Every panel, drawn when it is asked for.

        Raises:
            FlashRLError: matplotlib is not installed.
        """
        drawing = Drawing(arms=self.arms, smooth=self.smooth)
        return [
            Picture(
                panel=panel,
                caption=" ".join([panel.caption, *(f"{words}." for words in incomplete_means(panel, self.arms))]),
                alt=alt_text(panel, self.arms),
                svg=drawing.picture(panel),
            )
            for panel in self.panels
        ]

    @cached_property
    def overview(self) -> bytes | None:
        """PNG of the chief panels together; None where no run logged a learning curve."""
        return Drawing(arms=self.arms, smooth=self.smooth).overview(self.panels)

    @cached_property
    def notes(self) -> list[str]:
        """What a reader of the curves has to know, a line each."""
        return list(_notes(self.arms, self.panels, self.smooth))

    def sections(self) -> Iterator[tuple[str, list[Picture]]]:
        """The parts of the report that have pictures, with them."""
        for section in Section:
            there = [picture for picture in self.pictures if picture.panel.section is section]
            if there:
                yield section.value, there

    def overview_alt(self) -> str:
        """What the overview shows, for those who do not see it."""
        return (
            "Overview: accuracy by step, by time and by speed; below them mismatch KL, weights or correlation, step "
            "time."
        )

    def absent_line(self) -> str:
        """One line on what is not drawn; empty when everything is."""
        return f"Not drawn, because no run logged it: {'; '.join(self.absent)}." if self.absent else ""

    def table(self) -> Table:
        """The summary for a terminal: a column a run, so that names stay whole."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="FlashRL runs", title_justify="left")
        table.add_column(self.summary.header[0], style="bold")
        for row in self.summary.rows:
            table.add_column(escape(row[0]), overflow="fold")
        for i, name in enumerate(self.summary.header[1:], start=1):
            cells = [row[i] for row in self.summary.rows]
            table.add_row(name, *(f"[red]{escape(cell)}[/]" if "NOT " in cell else escape(cell) for cell in cells))
        return table


def compare(paths: Sequence[Path], names: Sequence[str] = (), smooth: int = 1, group: bool = False) -> Comparison:
    """Read the runs, and see what there is to show.

    Args:
        paths: run directories or metrics files.
        names: one a path, or none.
        smooth: last logged values whose mean is drawn; the values themselves stay faint behind it.
        group: runs of the same name are drawn as mean and range.

    Raises:
        FlashRLError: see `load_arms`.
    """
    arms = load_arms(paths, names, group)
    there, absent = panels(arms)
    return Comparison(arms=arms, panels=there, absent=absent, smooth=smooth)


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Write `report.html` (complete in itself), `report.md` and the pictures that it points at; returns the paths of
    the first two and of the overview."""
    from flashrl_verl.tools.report import markdown, page

    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in comparison.pictures:
        (pictures / f"{picture.panel.name}.svg").write_bytes(picture.svg)
    written = [folder / PAGE_FILE, folder / SECOND_FILE]
    written[0].write_text(page.render(comparison), encoding="utf-8")
    written[1].write_text(markdown.render(comparison), encoding="utf-8")
    if comparison.overview is not None:
        (folder / OVERVIEW_FILE).write_bytes(comparison.overview)
        written.append(folder / OVERVIEW_FILE)
    return written


def _notes(arms: Sequence[Arm], panels: Sequence[Panel], smooth: int) -> Iterator[str]:
    if smooth > 1:
        yield (
            f"Thick: means of the last {smooth} values, shown as thin lines. Held-out values and the table: as logged."
        )
    for arm in arms:
        if len(arm.runs) > 1:
            names = "; ".join(run.label for run in arm.runs)
            yield (
                f"{arm.label}: mean of {len(arm.runs)} runs, shaded from lowest to highest, at steps that all have "
                f"({names})."
            )
    incomplete: dict[str, list[str]] = {}
    for panel in panels:
        for words in incomplete_means(panel, arms):
            incomplete.setdefault(words, []).append(panel.title)
    for words, titles in incomplete.items():
        yield f"{words} in: {'; '.join(titles)}."
    for run in (run for arm in arms for run in arm.runs):
        metrics, planned = run.metrics, run.report.run.get("total_steps")
        if planned and metrics.last_step < planned:
            yield f"{run.label}: {metrics.last_step} of {planned} planned steps."
        if metrics.unreadable:
            lines = ", ".join(map(str, metrics.unreadable[:5])) + (", ..." if len(metrics.unreadable) > 5 else "")
            yield (
                f"{run.label}: {metrics.unreadable_lines} of its lines are no record and were left out (line {lines})."
            )
        if untimed := metrics.untimed_steps():
            yield (
                f"{run.label}: {untimed} of {metrics.last_step} steps have no time in its file; training time lacks "
                "them."
            )
        nothing = sum(value <= 0 for value in metrics.series(MISMATCH_KL)[1])
        if nothing:
            yield (
                f"{run.label}: at {nothing} steps the mismatch KL is not above 0 and has no place on the logarithmic "
                "axis."
            )
        if not metrics.series(MISMATCH_KL)[0]:
            yield f"{run.label}: no mismatch was logged; verl does where rollout.calculate_log_probs is true."
        elif not metrics.series(IS_WEIGHTS)[0]:
            yield f"{run.label}: without importance weights, so without an effective sample size and a truncated share."
    if len(arms) > DISTINCT:
        yield f"More than {DISTINCT} arms: lines and markers repeat; compare fewer at a time."
