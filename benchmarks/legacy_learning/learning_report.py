# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and curves of ``flashrl bench learning``."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.legacy_learning.learning import environment, shared
from benchmarks.legacy_learning.learning_bf16 import SAMPLES
from benchmarks.legacy_learning.learning_results import SERIES, Estimate, Report, RunResult, accuracy_of
from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT
from flashrl_verl.trainer.atomic_write import write_whole

DATA_FILE, PICTURE_FILE = "learning.json", "learning.png"

_POINTS = 100
"""Of a series in the JSON, at most: longer ones are means over equal stretches of steps."""

_KEPT = ("actor_rollout_ref.actor.optim.", "algorithm.", "flashrl.", "trainer.test_freq")
"""Keys of the configuration in the JSON, with what is below them."""


def tables(report: Report) -> list[Table]:
    """One line an arm; one line a difference and figure, where there is any."""
    device = environment(report.config.hardware)["device"]
    arms = Table(title=f"Learning on {device}: means of finished runs", title_justify="left")
    columns = ("finished", "final, BF16", "own engine", "mean of curve", "k3 KL", "ESS", "truncated", "s/step")
    for name in ("arm", *columns):
        arms.add_column(name, justify="left" if name == "arm" else "right")
    for result in report.arms():
        arms.add_row(
            str(result.arm),
            f"{result.finished}/{result.runs}" + (f", {result.failed} FAILED" if result.failed else ""),
            _with_error(result.accuracy),
            _with_error(result.own),
            _with_error(result.curve),
            _mean(result.k3_kl, ".2e"),
            _mean(result.effective_sample_size, ".4f"),
            _mean(result.truncated_share, ".2g"),
            _mean(result.step_seconds, ".2f"),
        )
    found = report.differences()
    if not found:
        return [arms]
    pairs = Table(title="Differences (95 % intervals, Student's t)", title_justify="left")
    for name in ("arm", "minus", "figure", "seeds", "difference", "SE", "interval", "detectable", "Welch's interval"):
        pairs.add_column(name, justify="left" if name in ("arm", "minus", "figure") else "right")
    for pair in found:
        pairs.add_row(
            *(str(pair.arm), str(pair.baseline), pair.figure, str(pair.paired.seeds), f"{pair.paired.mean:+.3f}"),
            _number(pair.paired.standard_error),
            _interval(pair.paired),
            _number(pair.paired.detectable),
            _interval(pair.welch),
        )
    return [arms, pairs]


def notes(report: Report) -> list[str]:
    """How to read the tables, and what went wrong."""
    others = report.config.parallel - 1
    lines = [
        f"final, BF16: the last weights in one BF16 engine, mean@{SAMPLES} over the held-out chains; own engine and "
        "curve: sampled from the rollout's own engine, in the arm's precision (docs/evaluation.md). Means over seeds, "
        "with one standard error."
    ]
    if report.start:
        found = accuracy_of(report.start)
        lines.append(f"The start, in BF16: {found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}] over chains.")
    lines.append(
        "All runs start from one warmed-up model and share its chains: intervals are over the order of chains and the "
        "sampling, not over models or tasks."
    )
    if others > 0:
        lines.append(
            f"Seconds, and the picture over hours, are of runs that share the machine with up to {others} more, "
            "checkpoints included: how fast an arm is cannot be read off them."
        )
    if len(report.differences()) > 1:
        lines.append(
            f"{len(report.differences())} differences: where nothing differs, one interval in twenty leaves out 0 all "
            "the same; one that holds 0 is no proof of equality. Difference, SE and interval are paired by seed; "
            "detectable: how large a true difference has to be for four of five such experiments to leave out 0. Where "
            "Welch's interval is narrower, pairing gained nothing."
        )
    for run in report.runs:
        if run.state.error and not run.finished:
            times = f"failed {run.state.failures} times" if run.state.failures > 1 else "failed once"
            lines.append(f"{run.state.run.name} {times}: {' '.join(run.state.error)}")
    return lines


def _mean(value: Estimate | None, form: str) -> str:
    return "-" if value is None else format(value.mean, form)


def _with_error(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.standard_error is None else f" ± {value.standard_error:.3f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(value: Estimate) -> str:
    return "-" if value.interval is None else "[{:+.3f}, {:+.3f}]".format(*value.interval)


# ---- files ----


def write(report: Report) -> list[Path]:
    """Write ``learning.json``, and ``learning.png`` where there is anything to draw; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``learning.json`` is there.
    """
    from benchmarks.legacy_learning.learning_plot import plot

    data, picture = report.config.output / DATA_FILE, report.config.output / PICTURE_FILE
    write_whole(data, (json.dumps(to_json(report)) + "\n").encode())
    return [data, picture] if plot(to_json(report, steps_a_point=1), picture) else [data]


def to_json(report: Report, steps_a_point: int | None = None) -> dict[str, Any]:
    """Settings, environment, today, figures by arm, differences, and every run's series; NaN and infinities as null.

    Args:
        report: of the runs.
        steps_a_point: steps whose mean a point of the series is; None for so many that at most ``_POINTS`` are left.
    """
    width = steps_a_point or math.ceil(report.config.steps / _POINTS)
    return _plain(
        {
            **shared(report.config),
            "date": datetime.date.today().isoformat(),
            "steps": report.config.steps,
            "steps_a_point": width,
            "arms": [
                {**asdict(result), "arm": str(result.arm), "configuration": configuration(report.of(result.arm))}
                for result in report.arms()
            ],
            "differences": [
                {
                    "arm": str(pair.arm),
                    "minus": str(pair.baseline),
                    "figure": pair.figure,
                    **{
                        name: {**asdict(value), "interval": value.interval, "detectable": value.detectable}
                        for name, value in (("paired", pair.paired), ("welch", pair.welch))
                    },
                }
                for pair in report.differences()
            ],
            "start": report.start and report.start["metrics"],
            "runs": [_run_json(run, width, report.config.steps) for run in report.runs],
        }
    )


def configuration(runs: Sequence[RunResult]) -> dict[str, Any]:
    """What an arm's first run was begun with, of the parts that experiments differ in; values by dotted key."""
    kept = next((run.configuration for run in runs if run.configuration), {})
    return {key: value for key, value in kept.items() if key.startswith(_KEPT)}


def _run_json(run: RunResult, width: int, last: int) -> dict[str, Any]:
    held_out = run.metrics.keys(HELD_OUT)
    series = {"accuracy": run.accuracy()} | {
        name: thin(*run.metrics.series(key), width, last) for name, key in SERIES.items()
    }
    return {
        "arm": str(run.arm),
        "seed": run.seed,
        "status": run.state.status.value,
        "step": run.state.step,
        "error": list(run.state.error),
        "bf16": run.bf16 and run.bf16["metrics"],
        "held_out": held_out[0] if held_out else None,
        "series": {name: {"step": steps, "value": values} for name, (steps, values) in series.items()},
    }


def thin(steps: Sequence[int], values: Sequence[float], width: int, last: int) -> tuple[list[int], list[float]]:
    """Means over stretches of ``width`` steps, each at the last of its steps: the same in every run, whichever step one
    lacks.

    Args:
        steps: ascending, from 1 on.
        values: theirs.
        width: steps of a stretch.
        last: step of a run, with which the last stretch ends.
    """
    stretches: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        stretches.setdefault(min(width * math.ceil(step / width), last), []).append(value)
    return [*stretches], [sum(found) / len(found) for found in stretches.values()]


def _plain(value: Any) -> Any:
    """Floats with four digits, which is more than a seed is worth; what JSON has no word for as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
