# SPDX-License-Identifier: Apache-2.0
"""What a training shows while it runs: a line for each phase of the start-up, then a line for each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.tools.process_tree import ProcessTree, Stopped
from flashrl_verl.tools.recipe_process import ROOT
from flashrl_verl.tools.report import HELD_OUT, MISMATCH_KL, SCORE, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

START_UP = (
    ("", "starting Python"),
    ("ray init kwargs", "starting Ray"),
    ("Started a local Ray instance", "starting verl"),
    ("dataset len:", "loading the data"),
    ("Before FSDP", "building the trainer's model"),
    ("model engine initialized", "starting vLLM"),
    ("ready to fit", "sending the first weights, validating"),
    ("Training Progress", "first step"),
)
"""Texts in the training's log, and what has begun when they are there."""


def read_rows(file: Path) -> dict[int, dict[str, float]]:
    """What verl's file logger has written so far: metrics by step."""
    return read_metrics(file).rows if file.is_file() else {}


class Progress:
    """Tells what is new at each `update`.

    Args:
        console: where people read.
        total: steps to run to.
        log: the training's output.
        log_from: byte of the log at which this attempt starts.
        metrics: file of verl's file logger. What is in it now is of an earlier attempt.
    """

    def __init__(self, console: Console, total: int, log: Path, log_from: int, metrics: Path):
        self._console, self._total, self._log, self._log_from = console, total, log, log_from
        self._metrics, self._before = metrics, _modified(metrics)
        self._phase, self._began = "", time.monotonic()
        self._first: tuple[int, float] | None = None
        self.step = -1
        """The last one of this attempt, or -1."""
        self.trains_since: float | None = None
        """When the first metrics came, by `time.monotonic`: the end of the start-up."""

    def update(self) -> None:
        """Read log and metrics, and print a line if there is news."""
        rows = {} if _modified(self._metrics) == self._before else read_rows(self._metrics)
        if rows and max(rows) > self.step:
            self.step, now = max(rows), time.monotonic()
            self.trains_since = self.trains_since or now
            self._first = self._first or (self.step, now)
            self._say_at(now, ", ".join([f"step {self.step}/{self._total}", *_words(rows), *self._time_left(now)]))
        elif self.step < 0:
            text = self._log.read_bytes()[self._log_from :].decode(errors="replace") if self._log.is_file() else ""
            phase = [words for mark, words in START_UP if mark in text][-1]
            if phase != self._phase:
                self._phase = phase
                self._say_at(time.monotonic(), f"start-up: {phase}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _say_at(self, now: float, line: str) -> None:
        self.say(f"[{now - self._began:3.0f} s] {line}")

    def _time_left(self, now: float) -> list[str]:
        step, since = self._first
        if not step < self.step < self._total:
            return []
        seconds = (now - since) / (self.step - step) * (self._total - self.step)
        return [f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"]


def follow(command: Sequence[str], log: Path, environment: dict[str, str], progress: Progress) -> int:
    """Run a training to its end and tell its progress; a stop ends all its processes.

    Args:
        command: started in the checkout.
        log: takes its output.
        environment: of the process.
        progress: of the same log.

    Returns:
        Its exit code.

    Raises:
        Stopped: inside `stoppable`.
    """
    tree = ProcessTree(command, log, environment, ROOT)
    try:
        while (code := tree.poll()) is None:
            progress.update()
            time.sleep(0.5)
        progress.update()
        return code
    except Stopped:
        progress.say("stopping the training (again: at once) ...")
        raise
    finally:
        tree.end()


def _modified(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.is_file() else None


def _words(rows: dict[int, dict[str, float]]) -> list[str]:
    last = rows[max(rows)]
    found = [("held-out accuracy", value, ".3f") for key, value in last.items() if HELD_OUT.fullmatch(key)]
    found += [("score of kept groups", last.get(SCORE), ".2f"), ("mismatch KL", last.get(MISMATCH_KL), ".1e")]
    return [f"{name} {value:{form}}" for name, value, form in found if value is not None]
