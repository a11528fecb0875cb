# SPDX-License-Identifier: Apache-2.0
"""The runs to compare, each with a name of its own, and the arms they are drawn as: one run, or the seeds of one
setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError
from benchmarks.legacy_learning.tools.report.metrics import BF16_REPLICAS, HELD_OUT_CORE, KV_BITS, REJECTED, SCORE, STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.palette import Style, style
from benchmarks.legacy_learning.tools.report.run import METRICS_FILE, Report, load

LAYERS = "flashrl/quantized_layers"


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """A run and what it is called in this comparison."""

    label: str
    report: Report

    @property
    def metrics(self) -> Metrics:
        return self.report.metrics


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one curve is of: a run, or with `--group` every run of the same name."""

    label: str
    runs: tuple[NamedRun, ...]
    style: Style


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An arm's values. With several runs: their mean, lowest and highest where each of those that have any has one."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    runs: int
    """Of how many runs: those without any of these values (or without a time, against time) are left out."""


Values = Callable[[Metrics], tuple[list[int], list[float]]]
"""Steps and values of a run."""


def require_once(paths: Sequence[Path], files: Sequence[Path]) -> None:
    """Refuse to compare a run with itself.

    Args:
        paths: as they were given.
        files: what is read of each.

    Raises:
        FlashRLError: two paths lead to one file.
    """
    seen: dict[Path, Path] = {}
    for path, file in zip(paths, map(Path.resolve, files), strict=True):
        if file in seen:
            raise FlashRLError(f"{path} is the same file as {seen[file]}: {file}. Give each run once.")
        seen[file] = path


def load_arms(paths: Sequence[Path], names: Sequence[str] = (), group: bool = False) -> list[Arm]:
    """Read the runs and name them.

    Args:
        paths: run directories or metrics files.
        names: one a path; empty to derive them from what the run recorded, else from its file's name.
        group: runs of the same name are one arm.

    Raises:
        FlashRLError: a path is no run or occurs twice, or the names do not fit.
    """
    if names and len(names) != len(paths):
        raise FlashRLError(f"{len(names)} --name for {len(paths)} runs: give one for each, in their order, or none.")
    if any(not name.strip() for name in names):
        raise FlashRLError("--name '' is empty: the run could not be told from the others.")
    reports = [load(path) for path in paths]
    require_once(paths, [report.metrics_path for report in reports])
    arms = list(names) or [derived_name(report) for report in reports]
    if names and not group:
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        if twice:
            raise FlashRLError(
                f"--name {twice[0]!r} occurs twice: give each run its own, or --group to draw them as one arm."
            )
    runs = [NamedRun(label=label, report=report) for label, report in zip(unique(arms, reports), reports, strict=True)]
    if not group:
        return [Arm(label=run.label, runs=(run,), style=style(i)) for i, run in enumerate(runs)]
    members: dict[str, list[NamedRun]] = {}
    for arm, run in zip(arms, runs, strict=True):
        members.setdefault(arm, []).append(run)
    return [Arm(label=arm, runs=tuple(them), style=style(i)) for i, (arm, them) in enumerate(members.items())]


def derived_name(report: Report) -> str:
    """Precision and correction where they are recorded and the engine held that precision; else the file's name."""
    chosen, layers, correction = report.run.get("precision"), report.metrics.last(LAYERS), report.run.get("correction")
    held = layers is not None and (layers > 0) == (chosen != "bf16")
    whole = correction is not None and ("rollout_rs" in correction or not report.metrics.series(REJECTED)[0])
    if chosen and whole and held:
        mixed = "+BF16" if layers and report.metrics.last(BF16_REPLICAS) else ""
        cache = " with 8-bit KV" if report.metrics.last(KV_BITS) == 8 else ""
        return f"{chosen.upper()}{mixed}{cache}, {short_correction(correction)}"
    path = report.metrics_path.resolve()
    return path.parent.name if path.name == METRICS_FILE else path.stem


def short_correction(settings: dict[str, Any]) -> str:
    """The correction in two or three words, for a legend."""
    level, threshold, rejection = (settings.get(key) for key in ("rollout_is", "rollout_is_threshold", "rollout_rs"))
    words = ["bypass"] if settings.get("bypass_mode") else []
    if level is not None:
        lower, _, upper = str(threshold).partition("_")
        weights = f"IcePop {lower}-{upper}" if upper else f"TIS C={float(threshold):g}"
        words.append(weights if level == "token" else f"{weights} per {level}")
    if rejection is not None:
        words.append(f"reject {rejection}")
    return ", ".join(words) or "no correction"


def unique(names: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """The names, where one occurs twice with the seed behind it, or with the directory's name, or with a number."""
    for more in (
        lambda i: f"seed {reports[i].run['seed']}" if "seed" in reports[i].run else "",
        lambda i: reports[i].metrics_path.resolve().parent.name,
        lambda i: f"run {names[: i + 1].count(names[i])}",
    ):
        counts = Counter(names)
        told = [f"{name}, {more(i)}" if counts[name] > 1 and more(i) else name for i, name in enumerate(names)]
        if len(set(told)) == len(told):
            return told
    return [f"{name}, #{i}" for i, name in enumerate(names, start=1)]


def curve(arm: Arm, values: Values, against_time: bool, smooth: int = 1) -> Curve:
    """An arm's values over steps, or over hours of training.

    Args:
        arm: the runs.
        values: what to take from each of them.
        against_time: x is in hours (for several runs: the mean of theirs) instead of steps.
        smooth: the mean of this many last logged values is drawn; 1 for the values as they are.
    """
    series, clocks = [], []
    for run in arm.runs:
        steps, numbers = values(run.metrics)
        if steps and not (against_time and not run.metrics.series(STEP_TIME)[0]):  # all of it at hour 0 would mislead
            series.append(dict(zip(steps, trailing_mean(numbers, smooth), strict=True)))
            clocks.append(run.metrics.clock())
    common = sorted(set.intersection(*map(set, series))) if series else []
    columns = [[by_step[step] for by_step in series] for step in common]
    return Curve(
        x=[mean(clock[step] for clock in clocks) if against_time else float(step) for step in common],
        y=[mean(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
        runs=len(series),
    )


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with the `window - 1` before it, as far as there are any; NaN wherever the window holds one."""
    return [mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of none."""
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def of_key(key: str) -> Values:
    """The values logged under `key`."""
    return lambda metrics: metrics.series(key)


def logged(arms: Sequence[Arm], values: Values) -> bool:
    """Whether any run has any of these values."""
    return any(values(run.metrics)[0] for arm in arms for run in arm.runs)


def accuracy_keys(arms: Sequence[Arm]) -> list[str]:
    """Names of the held-out accuracies that any run logged; the training score's where there is none."""
    return sorted({key for arm in arms for run in arm.runs for key in run.metrics.keys(HELD_OUT_CORE)}) or [SCORE]


def accuracy_name(key: str, keys: Sequence[str]) -> str:
    """One of these names of `accuracy_keys` in words, with the data's source where there are several."""
    if key == SCORE:
        return "training score"
    match = HELD_OUT_CORE.fullmatch(key)
    what = {"acc": "accuracy"}.get(match["what"], match["what"])
    source = f", {match['source']}" if len(keys) > 1 else ""
    return f"held-out {what}{source}" + (f" (mean of {match['k']})" if match["k"] != "1" else "")
