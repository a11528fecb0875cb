# SPDX-License-Identifier: Apache-2.0
"""Table, JSON and plot of ``flashrl bench refit``."""

import statistics
from pathlib import Path

from rich.table import Table

from benchmarks.refit import Report, Result
from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import BLUE, ORANGE

_MIB = 2**20


def table(report: Report) -> Table:
    """One line an arm: median and range of the seconds, GB/s, share of the copy's bandwidth, extra memory."""
    copy = statistics.median(report.copy_gigabytes_per_second)
    repeats = len(report.copy_gigabytes_per_second)
    built = Table(title=f"Refit of {report.model} on {report.device}, copy {copy:.0f} GB/s, {repeats} repeats")
    for column in (
        "arm",
        "source",
        "refit ms (range)",
        "loading alone ms",
        "GB read + written",
        "GB/s",
        "of copy",
        "extra MiB",
    ):
        built.add_column(column, justify="left" if column in ("arm", "source") else "right")
    for result in report.results:
        built.add_row(
            result.arm,
            result.source,
            _milliseconds(result.refit_seconds),
            _milliseconds(result.load_seconds),
            f"{result.read_bytes / 1e9:.4g} + {result.written_bytes / 1e9:.4g}",
            f"{result.gigabytes_per_second:.4g}",
            f"{result.gigabytes_per_second / copy:.0%}",
            "-" if result.extra_bytes is None else f"{result.extra_bytes / _MIB:.0f}",
        )
    return built


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``refit.json`` and ``refit.png``; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``refit.json`` is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "refit.json", folder / "refit.png"
    data.write_text(report.to_json())
    _plot(report, picture)
    return [data, picture]


def _milliseconds(seconds: list[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds) * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f})"


def _floor_seconds(result: Result, copy: float) -> float:
    return (result.read_bytes + result.written_bytes) / 1e9 / copy


def _plot(report: Report, path: Path) -> None:
    copy = statistics.median(report.copy_gigabytes_per_second)
    results = report.results[::-1]
    figure = new_figure(8, 1.2 + 0.55 * len(results))
    axes = figure.subplots()
    medians = [statistics.median(r.refit_seconds) * 1e3 for r in results]
    spread = [
        [m - min(r.refit_seconds) * 1e3 for m, r in zip(medians, results, strict=True)],
        [max(r.refit_seconds) * 1e3 - m for m, r in zip(medians, results, strict=True)],
    ]
    colours = [BLUE if r.arm.startswith("flashrl") else ORANGE for r in results]
    rows = range(len(results))
    axes.barh(rows, medians, xerr=spread, color=colours, capsize=3, height=0.6)
    for row, median, result in zip(rows, medians, results, strict=True):
        floor = _floor_seconds(result, copy) * 1e3
        axes.plot(
            [floor, floor],
            [row - 0.38, row + 0.38],
            color="black",
            linewidth=2,
            label="at the copy's bandwidth" if not row else None,
        )
        axes.annotate(
            f" {median:.3g} ms",
            (max(result.refit_seconds) * 1e3, row),
            va="center",
            xytext=(6, 0),
            textcoords="offset points",
        )
    axes.set_yticks(list(rows), [r.arm for r in results])
    axes.set_xlabel("one weight update, ms (median; bars: range)")
    axes.set_title(f"{report.model}, {results[0].source} source, {report.device}", fontsize=10, loc="left")
    axes.margins(x=0.18)
    axes.set_ylim(-0.6, len(results))  # room for the legend above the bars
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.98))
    save(figure, path)
