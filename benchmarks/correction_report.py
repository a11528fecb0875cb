# SPDX-License-Identifier: Apache-2.0
"""Table, JSON and plot of ``flashrl bench correction``."""

from pathlib import Path

from rich.table import Table

from benchmarks.correction import PARTS, Report, median_seconds
from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import BLUE, FAINT, ORANGE, TITLE, VERMILION

_STYLES = {"padding": (ORANGE, "s", ":"), "verl": (VERMILION, "o", "-"), "flashrl": (BLUE, "^", "--")}


def table(report: Report) -> Table:
    """One line a part and length: median and range of the seconds, peak memory."""
    built = Table(title=f"Correction of {report.responses} responses on {report.device}")
    for column in ("where, what", "longest response", "rows", "seconds (range)", "peak memory, GiB"):
        built.add_column(column, justify="left" if column.startswith("where") else "right")
    for cost in sorted(report.costs, key=lambda cost: list(PARTS).index(cost.part)):
        built.add_row(
            PARTS[cost.part].format(ranks=report.ranks),
            f"{cost.tokens}",
            f"{cost.rows}",
            f"{median_seconds(cost):.2f} ({min(cost.seconds):.2f}-{max(cost.seconds):.2f})",
            f"{cost.peak_bytes / 2**30:.2f}",
            end_section=cost.tokens == report.costs[-1].tokens,
        )
    built.add_row("driver: correction, FlashRL", "any", "-", "0: there is none", "0")
    return built


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``correction.json`` and ``correction.png``; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``correction.json`` is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "correction.json", folder / "correction.png"
    data.write_text(report.to_json())
    _plot(report, picture)
    return [data, picture]


def _plot(report: Report, path: Path) -> None:
    figure = new_figure(10, 4)
    seconds, memory = figure.subplots(1, 2)
    for axes, title, value in (
        (seconds, "Seconds a step", median_seconds),
        (memory, "Peak memory, GiB", lambda cost: cost.peak_bytes / 2**30),
    ):
        axes.set_title(title, **TITLE)
        for part, (colour, marker, line) in _STYLES.items():
            costs = [cost for cost in report.costs if cost.part == part]
            label = PARTS[part].format(ranks=report.ranks)
            axes.plot(
                [c.tokens for c in costs],
                [value(c) for c in costs],
                color=colour,
                marker=marker,
                linestyle=line,
                label=label,
            )
        axes.set_xlabel("longest response, tokens")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    seconds.legend(fontsize=8, frameon=False, loc="upper left")
    figure.suptitle(f"{report.responses} responses, {report.device}", fontsize=9, x=0.01, ha="left", color="#666666")
    save(figure, path)
