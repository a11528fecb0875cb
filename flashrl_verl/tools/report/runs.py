# SPDX-License-Identifier: Apache-2.0
"""The runs of a report, each with a name, and the table that compares them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.report.metrics import HELD_OUT, MISMATCH_KL, MISSING, SCORE, Metrics, read_metrics, show
from flashrl_verl.tools.report.palette import BLUE, GREY, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from rich.table import Table

METRICS_FILE, RUN_FILE = "metrics.jsonl", "run.json"
ESS = "rollout_corr/rollout_is_eff_sample_size"
STEP_TIME = "timing_s/step"
"""Seconds of a step: rollout to weight update, checkpoint included, validation left out."""
PHASES = {
    "gen": ("rollout", SKY),
    "reward": ("reward", PURPLE),
    "old_log_prob": ("old log-probs", ORANGE),
    "ref": ("reference log-probs", "#999933"),
    "update_actor": ("update", BLUE),
    "update_weights": ("refit", VERMILION),
    "save_checkpoint": ("checkpoint", "#666666"),
    "other": ("other", GREY),
}
"""Parts of a step in their order: verl's `timing_s/<name>` to a label and a colour; `other` is the rest."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One metrics file, and what is known of its run."""

    name: str
    metrics: Metrics
    facts: dict[str, Any]
    """`run.json` beside the metrics, which the quickstart writes; empty for other runs."""
    path: Path

    def phases(self) -> dict[str, float]:
        """Mean seconds of each part of a step, over the steps that logged their time; empty where none did. The first
        is left out where there are others: agent loops start in it, and kernels are compiled."""
        rows = [row for row in self.metrics.rows.values() if math.isfinite(row.get(STEP_TIME, math.nan))]
        rows = rows[1:] or rows
        if not rows:
            return {}
        parts = {name: fmean(row.get(f"timing_s/{name}", 0.0) for row in rows) for name in PHASES}
        parts["other"] = max(0.0, fmean(row[STEP_TIME] for row in rows) - sum(parts.values()))
        return {PHASES[name][0]: seconds for name, seconds in parts.items() if seconds != 0}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs by the name that they are shown under: one each, or several (seeds) of one name."""

    groups: dict[str, list[Run]]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.groups.values() for run in runs]

    def rows(self) -> list[tuple[str, list[str]]]:
        """Label, and a cell for each group. Of several runs: the mean, the range, and how many, where not all logged
        it. What no run logged is left out, except for score, mismatch and time, whose absence is worth a line."""
        table = [(label, [cell(runs) for runs in self.groups.values()]) for label, cell in _rows(self.runs)]
        return [(label, cells) for label, cells in table if set(cells) != {MISSING} or label in _ALWAYS]

    def table(self) -> Table:
        """The rows for a terminal, a column a group."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="FlashRL runs", title_justify="left")
        table.add_column(style="bold")
        for name in self.groups:
            table.add_column(escape(name), overflow="fold")
        for label, cells in self.rows():
            table.add_row(label, *(f"[red]{escape(cell)}[/]" if "NOT " in cell else escape(cell) for cell in cells))
        return table


def load(*paths: Path, names: Sequence[str] = (), group: bool = False) -> Report:
    """Read runs.

    Args:
        paths: run directories or metrics files.
        names: one a path, in their order; else from what the run recorded, or its file's name.
        group: runs of the same name are shown together.

    Raises:
        FlashRLError: a path is no run or occurs twice, or the names do not fit.
    """
    if names and len(names) != len(paths):
        raise FlashRLError(f"{len(names)} --name for {len(paths)} runs: give one for each, in their order, or none.")
    runs = [_read(Path(path), name) for path, name in zip(paths, names or [""] * len(paths), strict=True)]
    for path, times in Counter(run.path.resolve() for run in runs).items():
        if times > 1:
            raise FlashRLError(f"{path} is given {times} times. Give each run once.")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    if group:
        return Report(groups=groups)
    alone: dict[str, list[Run]] = {}
    for name, them in groups.items():
        for number, run in enumerate(them, start=1):
            alone[name if len(them) == 1 else f"{name} #{run.facts.get('seed', number)}"] = [run]
    if len(alone) < len(runs):  # two runs of one seed
        alone = {f"{run.name} #{number}": [run] for number, run in enumerate(runs, start=1)}
    return Report(groups=alone)


def _read(path: Path, name: str) -> Run:
    file = path / METRICS_FILE if path.is_dir() else path
    metrics = read_metrics(file)
    if not metrics.rows:
        if metrics.unreadable:
            raise FlashRLError(f'{file} is not a metrics file: no line of it is {{"step": n, "data": {{...}}}}.')
        raise FlashRLError(f"{file} holds no step: the run ended before its first validation or step.")
    facts_file = file.parent / RUN_FILE
    facts = _facts(facts_file) if file.name == METRICS_FILE and facts_file.is_file() else {}
    if not name:
        where = file.resolve()
        name = where.parent.name if file.name == METRICS_FILE else where.stem
        held = _precision(metrics, facts)
        if facts.get("precision") and held.startswith(facts["precision"]):  # else the name would say what it was not
            name = ", ".join(filter(None, [facts["precision"], _correction(facts)]))
    return Run(name=name, metrics=metrics, facts=facts, path=file)


def _facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text())
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise FlashRLError(f"{file} is damaged. Remove it: the report does without.")
    return facts


# ---- the rows ----

Cell = Callable[[Sequence[Run]], str]
Values = Callable[[Run], Sequence[float] | None]
"""Numbers of one run for one cell, such as the first and the last value; None where it logged none."""


def _last(series: Sequence[float]) -> list[float]:
    return [series[-1]]


def _first_last(series: Sequence[float]) -> list[float]:
    return [series[0], series[-1]]


def _over_all(reduce: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], list[float]]:
    """NaN where any value is NaN, however few."""
    return lambda series: [math.nan if any(map(math.isnan, series)) else reduce(series)]


_MEAN, _MEDIAN, _MAX = _over_all(fmean), _over_all(median), _over_all(max)

_METRICS = [
    ("training score", SCORE, _first_last, ".3f"),
    ("mismatch KL (k3), last", MISMATCH_KL, _last, ".2e"),
    ("mismatch KL (k3), largest", MISMATCH_KL, _MAX, ".2e"),
    ("probability correlation, last", "training/rollout_actor_probs_pearson_corr", _last, ".5f"),
    ("ESS of the weights, last", ESS, _last, ".4f"),
    ("weights truncated, last", "rollout_corr/rollout_is_ratio_fraction_high", _last, ".2g"),
    ("weights dropped (IcePop), last", "rollout_corr/rollout_is_oob_ratio", _last, ".2g"),
    ("tokens rejected, last", "rollout_corr/rollout_rs_masked_fraction", _last, ".2g"),
    ("response length", "response_length/mean", _first_last, ".4g"),
    ("entropy", "actor/entropy", _first_last, ".3f"),
    ("constant groups replaced, mean", "training/filter_groups/evicted_samples", _MEAN, ".1f"),
    ("rollout tokens/s, median", "flashrl/tokens_per_second_gen", _MEDIAN, ".0f"),
    ("tokens/s a GPU, whole step, median", "perf/throughput", _MEDIAN, ".0f"),
    ("refit s, median", "flashrl/refit_seconds", _MEDIAN, ".3g"),
    ("rollout weights, bytes", "flashrl/weight_bytes", _last, ".3g"),
    ("GPU memory allocated, GiB", "actor/perf/max_memory_allocated_gb", _MAX, ".1f"),
    ("guard events", "flashrl/guard_events", _last, ".0f"),
]
"""Label, metric, what of its series, format."""

_STEP = "seconds of a step, mean without the first"
_ALWAYS = {"rollout", "steps trained", "training score", "mismatch KL (k3), last", _STEP}


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, Cell]]:
    yield "rollout", _words(lambda run: _precision(run.metrics, run.facts))
    yield "correction", _words(lambda run: _correction(run.facts))
    yield "steps trained", _words(_steps)
    for key in sorted({key for run in runs for key in run.metrics.keys(HELD_OUT)}):
        match = HELD_OUT.fullmatch(key)
        what = "accuracy" if match["what"] == "acc" else "reward"
        yield f"held-out {what}, {match['source']}", _numbers(_of(key, _first_last), ".3f")
    for label, key, what, form in _METRICS:
        yield label, _numbers(_of(key, what), form)
    yield _STEP, _numbers(lambda run: [sum(parts.values())] if (parts := run.phases()) else None, ".2f")
    for label, _ in PHASES.values():
        yield f"- {label}", _numbers(_phase(label), ".2f")
    yield "wall time, s", _numbers(lambda run: _listed(run.facts.get("seconds", {}).get("total")), ".0f")


def _words(text: Callable[[Run], str | None]) -> Cell:
    """What the runs have in words: once, where it is the same in all."""
    return lambda runs: "; ".join(dict.fromkeys(text(run) or MISSING for run in runs))


def _numbers(values: Values, form: str) -> Cell:
    def cell(runs: Sequence[Run]) -> str:
        there = [found for run in runs if (found := values(run)) is not None]
        if not there:
            return MISSING
        said = " -> ".join(show(fmean(column), form) for column in zip(*there, strict=True))
        if len(there) > 1:
            ends = [found[-1] for found in there]
            said += f" ({show(min(ends), form)} to {show(max(ends), form)})"
        return said if len(there) == len(runs) else f"{said}, {len(there)} of {len(runs)} runs"

    return cell


def _of(key: str, what: Callable[[Sequence[float]], list[float]]) -> Values:
    return lambda run: what(series) if (series := run.metrics.series(key)[1]) else None


def _phase(label: str) -> Values:
    return lambda run: _listed(run.phases().get(label))


def _listed(value: float | None) -> list[float] | None:
    return None if value is None else [value]


def _steps(run: Run) -> str:
    planned, torn = run.facts.get("total_steps"), run.metrics.unreadable
    said = f"{run.metrics.last_step}" + (f" of {planned}" if planned else "")
    return said + (f", {len(torn)} unreadable lines (first: {torn[0]})" if torn else "")


def _precision(metrics: Metrics, facts: dict[str, Any]) -> str:
    """What the rollout was, by the engine's own count of layers; what was chosen is only said where the two agree."""
    chosen, layers = facts.get("precision"), metrics.last("flashrl/quantized_layers")
    if layers is None:
        return f"the engine's layers were {MISSING}" + (f"; chosen: {chosen}" if chosen else "")
    rotated = ", rotated" if metrics.last("flashrl/rotated_weights") else ""
    quantized = f"{show(layers, '.0f')} quantized layers{rotated}"
    if chosen and (layers > 0) != (chosen != "bf16"):
        return f"{quantized}: NOT {chosen}, which was chosen"
    cache = ", 8-bit KV cache" if metrics.last("flashrl/kv_cache_bits") == 8 else ""
    mixed = metrics.last("flashrl/bf16_replicas") if layers else 0
    others = f", {mixed:.0f} replicas in BF16" if mixed else ""
    return f"{chosen + ', ' if chosen else ''}{quantized}{cache}{others}"


def _correction(facts: dict[str, Any]) -> str | None:
    """verl's `algorithm.rollout_correction` in a few words; None where it is not recorded."""
    settings = facts.get("correction")
    if settings is None:
        return None
    level, cap, rejection = (settings.get(key) for key in ("rollout_is", "rollout_is_threshold", "rollout_rs"))
    words = ["bypass"] if settings.get("bypass_mode") else []
    if level is not None:
        lower, _, upper = str(cap).partition("_")
        words.append(f"{level} " + (f"IcePop {lower}-{upper}" if upper else f"TIS, cap {lower}"))
    if rejection is not None:
        words.append(f"rejection {rejection}")
    return ", ".join(words) or "no correction"
