# SPDX-License-Identifier: Apache-2.0
"""The table of what a run costs: seconds of a step by part, milliseconds of a refit by phase, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from flashrl_verl.tools.report.arms import Arm, NamedRun
from flashrl_verl.tools.report.metrics import MISSING, Metrics, show
from flashrl_verl.tools.report.step_time import step_parts
from flashrl_verl.tools.report.summary import Summary

TITLE = "Time and memory, by part"

CAPTION = (
    "Seconds of a step: means over all steps. Milliseconds of a refit: medians, of the slowest worker of each step. "
    "Memory: the largest value that the trainer's ranks logged (GiB), and the bytes that all engines together hold as "
    "weights (GB)."
)

REFIT_PHASES = {
    "gather": "flashrl/refit_gather_seconds",
    "transfer": "flashrl/refit_transfer_seconds",
    "quantize": "flashrl/refit_quantize_seconds",
    "verify": "flashrl/refit_verify_seconds",
}
"""Column to metric; ``trainer/metrics.py`` says what each is."""

MEMORY = {"allocated GiB": "actor/perf/max_memory_allocated_gb", "reserved GiB": "actor/perf/max_memory_reserved_gb"}
"""Column to verl's metric of the actor's GPUs; not logged on CPUs."""

WEIGHT_BYTES = "flashrl/weight_bytes"


def costs(arms: Sequence[Arm]) -> Summary | None:
    """The table of these runs; None where no run logged any of it. Columns that no run has are left out."""
    runs = [(run, arm.style) for arm in arms for run in arm.runs]
    rows = [_row(run) for run, _ in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    header = [name for name in names if name == "run" or any(row.get(name, MISSING) != MISSING for row in rows)]
    if len(header) == 1:
        return None
    cells = [[row.get(name, MISSING) for name in header] for row in rows]
    return Summary(header=header, rows=cells, styles=[style for _, style in runs])


def _row(run: NamedRun) -> dict[str, str]:
    metrics = run.metrics
    row = {"run": run.label}
    parts = step_parts(metrics)
    if parts:
        row["step s"] = show(sum(parts.values()), ".2f")
    row |= {f"{label} s": show(seconds, ".2f") for label, seconds in parts.items()}
    for name, key in REFIT_PHASES.items():
        row[f"refit: {name} ms"] = _over(median, metrics, key, 1e3)
    for name, key in MEMORY.items():
        row[name] = _over(max, metrics, key)
    weights = metrics.last(WEIGHT_BYTES)
    row["weights GB"] = MISSING if weights is None else show(weights / 1e9, ".3g")
    return row


def _over(reduce: Callable[[Sequence[float]], float], metrics: Metrics, key: str, unit: float = 1.0) -> str:
    """A series in one figure; values that are not finite are told and never left out."""
    values = metrics.series(key)[1]
    if not values:
        return MISSING
    lost = sum(not math.isfinite(value) for value in values)
    return f"NOT FINITE ({lost} of {len(values)})" if lost else show(unit * reduce(values), ".1f")
