# SPDX-License-Identifier: Apache-2.0
"""How far a run of ``flashrl bench learning`` is: read from its metrics, its record and its checkpoints, whoever stopped it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from flashrl_verl.bench.learning import Run
from flashrl_verl.report.metrics import HELD_OUT, Metrics, read_metrics
from flashrl_verl.report.run import METRICS_FILE
from flashrl_verl.run_directory import LATEST, read_record

TRIES = 2
"""How often a run may fail: a second time rules out what a neighbour did (no memory left, a port taken)."""


class Status(Enum):
    """What there is to do about a run."""

    NEW = "not started"
    UNFINISHED = "unfinished"
    """Stopped, or failed once: it is to go on."""
    FAILED = "failed"
    """``TRIES`` times; it is not tried again."""
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class State:
    """One run."""

    run: Run
    status: Status
    step: int
    """The last one in its metrics; 0 where there is none."""
    resumes_at: int
    """Step of its last whole checkpoint, from which it goes on; 0 where there is none."""
    failures: int
    error: tuple[str, ...]
    """Of the last attempt that failed."""


def state_of(run: Run, steps: int) -> State:
    """Look at a run's folder.

    Args:
        run: which.
        steps: to be trained.
    """
    metrics, attempts = metrics_of(run), read_record(run.folder).get("attempts", [])
    errors = errors_of(attempts)
    # The validation after the last step comes after everything else.
    if any(HELD_OUT.fullmatch(key) for key in metrics.rows.get(steps, {})):
        status = Status.FINISHED
    elif len(errors) >= TRIES:
        status = Status.FAILED
    else:
        status = Status.UNFINISHED if attempts or metrics.rows else Status.NEW
    return State(
        run=run,
        status=status,
        step=metrics.last_step,
        resumes_at=checkpoint_of(run.folder),
        failures=len(errors),
        error=tuple(errors[-1]) if errors else (),
    )


def process_of(folder: Path) -> int | None:
    """Number of the process of the run in a folder, if it is going on; None where there is none."""
    attempts = read_record(folder).get("attempts", [])
    started = attempts[-1].get("process") if attempts else None
    try:
        process = psutil.Process(started["pid"]) if started else None
        alive = process is not None and process.create_time() == started["created"]
        return process.pid if alive and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def errors_of(attempts: list[dict[str, Any]]) -> list[list[str]]:
    """The last lines of every attempt that failed. One that was stopped has none, nor has one whose scheduler was killed."""
    return [attempt["error"] for attempt in attempts if attempt.get("error")]


def metrics_of(run: Run) -> Metrics:
    """What a run has logged so far."""
    file = run.folder / METRICS_FILE
    return read_metrics(file) if file.is_file() else Metrics(rows={})


def checkpoint_of(folder: Path) -> int:
    """Step of the last whole checkpoint of the run in a folder; 0 where there is none."""
    file = folder / "checkpoints" / LATEST
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else 0
