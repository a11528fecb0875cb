# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and plot of ``flashrl bench mismatch``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.mismatch import PrecisionResult, Report
from benchmarks.mismatch_metrics import CORRELATION, K3_ERROR, K3_KL, PROBS_DIFF
from benchmarks.mismatch_noise import Spread
from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import FAINT, HEALTHY_KL, OF_PRECISION, TITLE
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETS = {"own": "own samples", "common": "common tokens"}
EMULATED = "emulated"

_LEGEND_COLUMNS = 3


def tables(report: Report) -> list[Table]:
    """The mismatch by precision, and the ratios by type of layer."""
    return [_mismatch_table(report), _noise_table(report)]


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``mismatch.json`` and ``mismatch.png``; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``mismatch.json`` is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "mismatch.json", folder / "mismatch.png"
    write_whole(data, report.to_json().encode())
    _plot(report, picture)
    return [data, picture]


def notes(report: Report) -> list[str]:
    """What a reader has to know beside the tables."""
    lines = [
        "own samples: the engine's responses, log-probs as sampled. common tokens: the BF16 engine's responses, scored "
        "by every engine (teacher-forced).",
        f"trainer: {report.trainer}. engines: {report.engine}.",
        "SQNR: median over matrices (lowest), dB. weight: codes x scales against BF16. output: emulated W8A8 product "
        f"against the exact one, inputs of {report.activation_tokens} tokens.",
    ]
    emulated = [str(r.arm) for r in _by_weights(report) if EMULATED in r.kernels.values()]
    if emulated:
        lines.append(
            f"{', '.join(emulated)}: no kernel on this device, emulated in float32; the numbers of the format alone."
        )
    return lines


def _mismatch_table(report: Report) -> Table:
    table = Table(title=f"Mismatch of {report.model} on {report.device}, {report.prompts}, seed {report.seed}")
    for column in (
        "precision",
        "linear kernel",
        "tokens of",
        "tokens",
        "k3 KL (± s.e.)",
        "probs diff mean",
        "correlation",
    ):
        table.add_column(column, justify="left" if column in ("precision", "linear kernel", "tokens of") else "right")
    for result in report.results:
        for i, (name, words) in enumerate(SETS.items()):
            metrics = getattr(result, name)
            table.add_row(
                *((str(result.arm), result.kernels["linear"]) if not i else ("", "")),
                words,
                f"{metrics['tokens']}",
                f"{metrics[K3_KL]:.2e} ± {metrics[K3_ERROR]:.0e}",
                f"{metrics[PROBS_DIFF]:.2e}",
                f"{metrics[CORRELATION]:.5f}",
                end_section=i == len(SETS) - 1,
            )
    return table


def _noise_table(report: Report) -> Table:
    table = Table(title="Signal-to-quantization-noise ratio by type of layer, dB")
    table.add_column("layer")
    table.add_column("matrices", justify="right")
    results = _by_weights(report)
    quantized = [r for r in results if math.isfinite(_worst(r))]
    for result in quantized:
        table.add_column(f"{result.precision} weight", justify="right")
    for result in results:
        table.add_column(f"{result.precision} output", justify="right")
    for i, kind in enumerate(report.results[0].noise):
        table.add_row(
            kind.kind,
            f"{kind.matrices}",
            *(_decibels(result.noise[i].weight) for result in quantized),
            *(_decibels(result.noise[i].output) for result in results),
        )
    return table


def _by_weights(report: Report) -> list[PrecisionResult]:
    """The first result of each precision: the KV cache plays no part in a layer's noise."""
    found: dict[str, PrecisionResult] = {}
    for result in report.results:
        found.setdefault(result.precision, result)
    return list(found.values())


def _worst(result: PrecisionResult) -> float:
    return min((kind.weight.lowest for kind in result.noise), default=math.inf)


def _decibels(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.1f} ({spread.lowest:.1f})"


def _plot(report: Report, path: Path) -> None:
    figure = new_figure(11, max(4.2, 1.4 + 0.42 * len(report.results)))
    kl, noise = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_kl(kl, report)
    _draw_noise(noise, report)
    for axes, axis in ((kl, "x"), (noise, "y")):
        axes.grid(axis=axis, color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.model} on {report.device}", fontsize=9, x=0.01, ha="left", color="#666666")
    save(figure, path)


def _draw_kl(axes: Axes, report: Report) -> None:
    axes.set_title("Mismatch KL, rollout to trainer (k3)", **TITLE)
    axes.set_xscale("log")
    drawn = []
    for shift, marker, (name, words) in zip((-0.17, 0.17), "os", SETS.items(), strict=True):
        for y, result in enumerate(report.results):
            metrics = getattr(result, name)
            value, error = metrics[K3_KL], metrics[K3_ERROR]
            if not value > 0:
                continue  # a log scale has no place for zero
            error = error if math.isfinite(error) else 0.0
            drawn.append(value)
            axes.errorbar(
                value,
                y + shift,
                # Down at most to a tenth: the axis is logarithmic.
                xerr=[[min(error, 0.9 * value)], [error]],
                fmt=marker,
                markersize=5,
                color=_colour(result),
                markerfacecolor=_colour(result) if name == "own" else "white",
                capsize=2,
            )
            beside = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            axes.annotate(f"{value:.1e}", (value + error, y + shift), (6, 0), **beside)
        axes.plot([], [], marker, color="#444444", markerfacecolor="#444444" if name == "own" else "white", label=words)
    axes.axvline(HEALTHY_KL, color="#666666", linestyle="--", linewidth=1, label=f"look closer above {HEALTHY_KL:g}")
    axes.set_xlim(min([*drawn, HEALTHY_KL]) / 2, max([*drawn, HEALTHY_KL]) * 4)
    axes.set_ylim(len(report.results) - 0.4, -0.6)  # the first on top
    axes.set_yticks(range(len(report.results)), [_label(result) for result in report.results], fontsize=8)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.07), columnspacing=1.2)


def _draw_noise(axes: Axes, report: Report) -> None:
    axes.set_title("Signal to quantization noise by layer, dB", **TITLE)
    kinds = [kind.kind for kind in report.results[0].noise]
    results = _by_weights(report)
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        offset = (i - (len(results) - 1) / 2) * width
        for part, marker, filled in (("output", "o", True), ("weight", "D", False)):
            spreads = [(x, getattr(kind, part)) for x, kind in enumerate(result.noise)]
            points = [(x + offset, s) for x, s in spreads if s is not None and math.isfinite(s.median)]
            if not points:
                continue
            axes.vlines(
                [x for x, _ in points],
                [s.lowest for _, s in points],
                [s.median for _, s in points],
                color=_colour(result),
            )
            axes.plot(
                [x for x, _ in points],
                [s.median for _, s in points],
                marker,
                color=_colour(result),
                markerfacecolor=_colour(result) if filled else "white",
                label=f"{result.precision} {part}",
            )
    axes.set_xticks(range(len(kinds)), kinds, rotation=25)
    low, high = axes.get_ylim()
    lines = math.ceil(len(axes.get_legend_handles_labels()[1]) / _LEGEND_COLUMNS)
    axes.set_ylim(low, high + (0.11 + 0.07 * lines) * (high - low))  # room for the legend
    axes.legend(
        fontsize=8,
        frameon=False,
        ncols=_LEGEND_COLUMNS,
        loc="upper center",
        title="median; line: down to the lowest matrix",
        title_fontsize=8,
    )


def _colour(result: PrecisionResult) -> str:
    return OF_PRECISION[result.arm.precision]


def _label(result: PrecisionResult) -> str:
    kernel = result.kernels["linear"]
    return f"{result.arm}" if kernel == "unquantized" else f"{result.arm}\n({kernel})"
