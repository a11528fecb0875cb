# SPDX-License-Identifier: Apache-2.0
"""What a training shows while it runs: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.legacy_learning.tools import report

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal to redraw."""

START_UP = (
    ("Started a local Ray instance", "starting Ray"),
    ("dataset len:", "loading the data"),
    ("Before FSDP", "building the trainer's model"),
    ("model engine initialized", "starting vLLM"),
    ("[flashrl] rollout precision", "validating before training"),
)
"""Texts in the training's log, and what they mean has begun. Only words for the wait: nothing depends on
them."""


class Display:
    """Tells how far the training is: a redrawn line on a terminal, a line every step or 10 s elsewhere.

    Args:
        console: where people read.
        total: steps to run to.
        log: the training's output.
        metrics: its metrics file.
        log_from: byte of the log at which this attempt starts; what is before it belongs to earlier ones.
    """

    def __init__(self, console: Console, total: int, log: Path, metrics: Path, *, log_from: int = 0):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console, self._log, self._metrics, self._total = console, log, metrics, total
        self._log_from = log_from
        self._step, self._spoke, self._phase = -1, time.monotonic(), "starting Python"
        self._changed = self._modified()  # until it changes, a resumed run shows what it did before
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(self._phase, total=total, left="")
        self._first_step, self._news = 0, 0.0
        self.first_line: float | None = None
        """When the first line of metrics came: the end of the start-up."""

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _modified(self) -> int | None:
        return self._metrics.stat().st_mtime_ns if self._metrics.is_file() else None

    def update(self) -> None:
        """Read what there is and show it."""
        fresh = self._modified() != self._changed
        metrics = report.read_metrics(self._metrics) if fresh else report.Metrics(rows={})
        news = bool(metrics.rows) and metrics.last_step > self._step
        if news:
            self._step, self._news = metrics.last_step, time.monotonic()
            if self.first_line is None:
                self.first_line, self._first_step = time.monotonic(), self._step
            self._phase = _progress_words(metrics)
        elif self._step < 0:
            self._phase = _startup_phase(self._log, self._log_from)
        left = self._time_left()
        self._bar.update(self._task, description=self._phase, completed=max(0, self._step), left=left)
        if not self._console.is_terminal and (news or time.monotonic() - self._spoke > PLAIN_INTERVAL):
            self._spoke = time.monotonic()
            step = f"step {self._step}/{self._total}: " if self._step >= 0 else "start-up: "
            waits = f"step {self._step + 1} is running" if self._step < self._total else "ending"
            words = self._phase if news or self._step < 0 else waits
            self._console.print(f"{step}{words}{left and f', {left}'}", markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        """From the mean time of the steps seen so far; empty before the first of them ends, and when it is over."""
        seen, ahead = self._step - self._first_step, self._total - self._step
        if self.first_line is None or seen < 1 or ahead < 1:
            return ""
        # The unfinished step is in the time but not in the count: it is taken off what is ahead.
        seconds = max(0.0, (self._news - self.first_line) / seen * ahead - (time.monotonic() - self._news))
        if seconds < 1:  # the last step takes longer than the others did
            return ""
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _startup_phase(log: Path, start: int) -> str:
    text = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    begun = [words for mark, words in START_UP if mark in text]
    return begun[-1] if begun else "starting Python"


def _progress_words(metrics: report.Metrics) -> str:
    parts = []
    for key in metrics.keys(report.HELD_OUT)[:1]:
        at = metrics.series(key)[0][-1]
        parts.append(
            f"held-out {report.show(metrics.last(key))}" + (f" (step {at})" if at != metrics.last_step else "")
        )
    for name, key, form in (("score (kept groups)", report.SCORE, ".2f"), ("mismatch KL", report.MISMATCH_KL, ".1e")):
        if metrics.series(key)[0]:
            parts.append(f"{name} {report.show(metrics.last(key), form)}")
    return ", ".join(parts) or "training"
