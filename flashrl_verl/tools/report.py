# SPDX-License-Identifier: Apache-2.0
"""`flashrl report`: runs compared from the metrics files that verl writes, while they run too. In reading order: one
file, the table with a row a run, the picture with five plots."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import GuardConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

HELD_OUT = re.compile(r"val-core/(?P<source>.+)/(?P<what>acc|reward)/mean@\d+")
"""verl's names for the accuracy on held-out prompts, and for the reward where the reward function gives no accuracy."""
SCORE, MISMATCH_KL, LENGTH = "critic/score/mean", "rollout_corr/k3_kl", "response_length/mean"
STEP_TIME = "timing_s/step"
"""Seconds of a step: rollout to weight update, checkpoint included, validation left out."""
PHASES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "update_actor": "update",
    "update_weights": "refit",
    "save_checkpoint": "checkpoint",
    "other": "other",
}
"""Parts of a step in their order: verl's `timing_s/<name>` to a label; `other` is the rest."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
"""That the colour-blind can tell apart: Okabe and Ito's (https://jfly.uni-koeln.de/color), without yellow."""
LINES = ("-", "--", "-.", ":")
"""7 colours and 4 lines have no common factor, so 28 runs differ."""
METRICS_FILE, PICTURE = "metrics.jsonl", "report.png"
MISSING = "-"


# ---- one file ----


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics by step, steps ascending."""

    rows: dict[int, dict[str, float]]
    """Step to metrics. verl's logger writes NaN and infinities as null; they are NaN here."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps that logged `key`, and its values there, NaN included."""
        points = [(step, row[key]) for step, row in self.rows.items() if key in row]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        """The last logged value, or None."""
        return next(reversed(self.series(key)[1]), None)

    def seconds(self) -> dict[int, float]:
        """Step to the training's seconds until its end, over the steps that are in the file."""
        times = np.nan_to_num([row.get(STEP_TIME, 0.0) for row in self.rows.values()])
        return dict(zip(self.rows, np.cumsum(times).tolist(), strict=True))

    def phases(self) -> dict[str, float]:
        """Mean seconds of each part of a step, over the steps that logged their time; empty where none did. The first
        is left out where there are others: agent loops start in it, and kernels are compiled."""
        rows = [row for row in self.rows.values() if math.isfinite(row.get(STEP_TIME, math.nan))]
        rows = rows[1:] or rows
        if not rows:
            return {}
        parts = {name: float(np.mean([row.get(f"timing_s/{name}", 0.0) for row in rows])) for name in PHASES}
        parts["other"] = max(0.0, float(np.mean([row[STEP_TIME] for row in rows])) - sum(parts.values()))
        return parts


def read_metrics(path: Path) -> Metrics:
    """Read verl's JSON lines, `{"step": n, "data": {...}}`.

    A step may occur twice, after a resume: its lines are merged and the later value of a metric wins. Lines that are no
    record, as the torn one that an interrupted run leaves, and values that are not numbers are left out.

    Raises:
        FlashRLError: the file is not there.
    """
    if not path.is_file():
        raise FlashRLError(
            f"{path} is not there: no such run was started, it logged nothing, or trainer.logger lacks `file`."
        )
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            step, data = int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            continue
        numbers = {key: math.nan if value is None else value for key, value in data.items()}
        rows.setdefault(step, {}).update({k: float(v) for k, v in numbers.items() if isinstance(v, int | float)})
    return Metrics(rows=dict(sorted(rows.items())))


def load(*paths: Path) -> dict[str, Metrics]:
    """Read runs: folders that hold a `metrics.jsonl`, metrics files, or folders of either, of whose files those without
    a step are left out. Each run has the name of its folder or file; where two would have the same, its path.

    Raises:
        FlashRLError: a path is no run, or holds no step yet.
    """
    found: dict[Path, Metrics] = {}
    for path in paths:
        of_path = {file: read_metrics(file) for file in _files(path)}
        with_steps = {file: metrics for file, metrics in of_path.items() if metrics.rows}
        if not with_steps:
            raise FlashRLError(
                f"{path} holds no step: the run ended before its first validation or step, or this is another file."
            )
        found |= with_steps
    names = [file.resolve().parent.name if file.name == METRICS_FILE else file.stem for file in found]
    return {
        str(file) if names.count(name) > 1 else name: metrics
        for (file, metrics), name in zip(found.items(), names, strict=True)
    }


def _files(path: Path) -> list[Path]:
    own = path / METRICS_FILE
    if not path.is_dir():
        return [path]
    return [own] if own.is_file() else sorted((*path.glob(f"*/{METRICS_FILE}"), *path.glob("*.jsonl"))) or [own]


# ---- the table ----

Reduce = Callable[[Sequence[float]], float]
_COLUMNS: list[tuple[str, str, Reduce, str]] = [
    ("k3-KL mean", MISMATCH_KL, np.mean, ".1e"),
    ("k3-KL largest", MISMATCH_KL, np.max, ".1e"),
    ("ESS least", "rollout_corr/rollout_is_eff_sample_size", np.min, ".4f"),
    ("rollout tokens/s", "flashrl/tokens_per_second_gen", np.median, ".0f"),
]
"""Header, metric, what of its series, format. numpy's functions give NaN where any value is NaN."""


def table_rows(runs: Mapping[str, Metrics]) -> list[list[str]]:
    """The header, then a row a run. Columns that no run has something for are left out."""
    columns = [["run", *runs], *([header, *map(cell, runs.values())] for header, cell in _cells(runs))]
    return [list(row) for row in zip(*(c for c in columns if set(c[1:]) != {MISSING}), strict=True)]


def table(runs: Mapping[str, Metrics]) -> Table:
    """The rows for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    header, *rows = table_rows(runs)
    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for index, words in enumerate(header):  # in 80 columns names are folded, not figures
        found.add_column("\n".join(escape(words).split()), overflow="fold", no_wrap=index > 1, min_width=5)
    for row in rows:
        found.add_row(*map(escape, row))
    return found


def _cells(runs: Mapping[str, Metrics]) -> Iterator[tuple[str, Callable[[Metrics], str]]]:
    yield "rollout", _rollout
    yield "steps", lambda run: f"{max(run.rows)}"
    for key in _held_out(runs) or [SCORE]:
        match = HELD_OUT.fullmatch(key)
        what = {"acc": "accuracy", "reward": "reward"}[match["what"]] if match else "training score"
        yield f"{what}, {match['source']}" if match else what, _first_last(key)
    for header, key, reduce, form in _COLUMNS:
        yield header, _reduced(key, reduce, form)
    yield "s/step", lambda run: f"{sum(parts.values()):.3g}" if (parts := run.phases()) else MISSING


def _held_out(runs: Mapping[str, Metrics]) -> list[str]:
    return sorted({key for run in runs.values() for row in run.rows.values() for key in row if HELD_OUT.fullmatch(key)})


def _rollout(run: Metrics) -> str:
    """What the engine held, by its own count of layers: no run is called INT8 because INT8 was chosen."""
    layers = run.last("flashrl/quantized_layers")
    if layers is None:
        return MISSING
    int8 = run.last("flashrl/int8_weights")
    name = "8-bit" if int8 is None else "INT8" if int8 else "FP8"  # the first: of an earlier version's file
    precision = f"{name}, {layers:.0f} layers" if layers else "BF16"
    precision += ", rotated" if run.last("flashrl/rotated_weights") else ""
    return precision + (", INT8 KV" if run.last("flashrl/kv_cache_bits") == 8 else "")


def _first_last(key: str) -> Callable[[Metrics], str]:
    def cell(run: Metrics) -> str:
        values = run.series(key)[1]
        return " -> ".join(f"{value:.3f}" for value in values[:1] + values[1:][-1:]) or MISSING

    return cell


def _reduced(key: str, reduce: Reduce, form: str) -> Callable[[Metrics], str]:
    return lambda run: format(reduce(values), form) if (values := run.series(key)[1]) else MISSING


# ---- the picture ----


def draw(runs: Mapping[str, Metrics], folder: Path) -> Path:
    """Write `report.png`: accuracy by step and by seconds, mismatch, response length, seconds of a step by phase.
    Returns its path."""
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(15, 8), layout="constrained")
    (accuracy, by_seconds, mismatch), (length, phases, legend) = figure.subplots(2, 3)
    key = next(iter(_held_out(runs)), SCORE)
    match = HELD_OUT.fullmatch(key)
    name = f"Accuracy, {match['source']}" if match else "Training score"
    _lines(accuracy, name, runs, key)
    _lines(by_seconds, f"{name}, by seconds", runs, key, by_seconds=True)
    _lines(mismatch, "Mismatch KL (k3); dotted: the guard's limit", runs, MISMATCH_KL)
    if mismatch.lines:
        mismatch.set_yscale("log", nonpositive="mask")
        mismatch.axhline(GuardConfig().k3_kl_max, color="0.3", linestyle=":", linewidth=1)
    _lines(length, "Response length, tokens", runs, LENGTH)
    _bars(phases, runs, colormaps["Set2"].colors)
    legend.set_axis_off()
    for index, name in enumerate(runs):
        legend.plot([], [], label=name, **_look(index))
    legend.legend(loc="upper left", frameon=False, fontsize=10 if len(runs) < 16 else 7)
    figure.savefig(folder / PICTURE, dpi=120)
    return folder / PICTURE


def _look(index: int) -> dict[str, Any]:
    colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
    return {"color": colour, "linestyle": line, "linewidth": 1.6}


def _lines(axes: Axes, title: str, runs: Mapping[str, Metrics], key: str, *, by_seconds: bool = False) -> None:
    for index, run in enumerate(runs.values()):
        steps, values = run.series(key)
        places = [run.seconds()[step] for step in steps] if by_seconds else steps
        if steps:
            marker = "o" if len(steps) < 30 else ""
            axes.plot(places, values, marker=marker, markersize=4, **_look(index))
    _frame(axes, title, "seconds, validation left out" if by_seconds else "training step")


def _bars(axes: Axes, runs: Mapping[str, Metrics], colours: Sequence[Any]) -> None:
    """Of runs that logged times, a bar each."""
    timed = {name: parts for name, run in runs.items() if (parts := run.phases())}
    left = np.zeros(len(timed))
    for (phase, label), colour in zip(PHASES.items(), colours, strict=True):
        width = np.array([parts[phase] for parts in timed.values()])
        if width.any():
            axes.barh(range(len(timed)), width, left=left, height=0.7, color=colour, label=label)
            left = left + width
    _frame(axes, "Seconds of a step, without the first", None)
    axes.set_yticks(range(len(timed)), [name if len(name) < 32 else f"{name[:30]}..." for name in timed], fontsize=8)
    axes.invert_yaxis()
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False, fontsize=9)


def _frame(axes: Axes, title: str, label: str | None) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(label or "")
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center")
