# SPDX-License-Identifier: Apache-2.0
"""A run of ``flashrl bench learning``: how far it is, read from its metrics, its record and its checkpoints, whoever
stopped it; and one start of it, with its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.legacy_learning.learning import Run
from benchmarks.legacy_learning.tools import run_directory
from benchmarks.legacy_learning.tools.log_excerpt import last_error
from benchmarks.legacy_learning.tools.process_tree import ProcessTree, Stopped
from benchmarks.legacy_learning.tools.recipe_process import ROOT, environment
from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT, Metrics, read_metrics
from benchmarks.legacy_learning.tools.report.run import METRICS_FILE
from benchmarks.legacy_learning.tools.run_directory import LATEST, read_record

if TYPE_CHECKING:
    from omegaconf import DictConfig

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


def states_of(runs: Iterable[Run], steps: int) -> list[State]:
    """``state_of`` each."""
    return [state_of(run, steps) for run in runs]


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
    """The last lines of every attempt that failed. One that was stopped has none, nor has one whose scheduler was
    killed."""
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


# ---- one start ----


class Attempt:
    """Start a run, or go on with it.

    Args:
        run: which.
        words: of its command.
        facts: of the record (`run.json`).
        cfg: the composed configuration, kept beside it.
        gpu: the one that it sees, by ``CUDA_VISIBLE_DEVICES``; None: all that this process does.
    """

    def __init__(self, run: Run, words: Sequence[str], facts: dict[str, Any], cfg: DictConfig, gpu: str | None = None):
        self.run, self.gpu = run, gpu
        self._record = run_directory.begin_attempt(run.folder, facts, cfg, resume=True)
        self._log = run.folder / run_directory.LOG_FILE
        with self._log.open("ab") as stream:
            number = len(self._record["attempts"])
            stream.write(f"---- attempt {number}, {time.strftime('%Y-%m-%d %H:%M:%S')} ----\n".encode())
            self._log_from = stream.tell()
        self._started = time.monotonic()
        metrics = run.folder / METRICS_FILE
        env = environment(metrics) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        # Memory is not measured: looking at it takes the lock that the runs' own allocations take.
        self._tree = ProcessTree(words, self._log, env, ROOT, memory=False)
        self._ending: threading.Thread | None = None
        self.stopped = False
        """Whether it was told to end before it did by itself."""
        self._metrics = metrics
        self._why: list[str] = []
        self._size, self._heard = _size(metrics), self._started
        self._lines = False
        self.checkpoint: int | None = None
        """The last step that it had saved and logged when time was nearly over, or one before what it had saved."""
        with suppress(psutil.NoSuchProcess):
            self._record["attempts"][-1]["process"] = self._tree.identity()
            run_directory.write_record(run.folder, self._record)

    def poll(self) -> bool:
        """Whether it is over, everything that it started included. Does not wait."""
        if self._ending is None:
            if self._tree.poll() is None:
                return False
            self._end()  # Ray's processes may outlive their driver for a while, and hold memory of the GPU
        return not self._ending.is_alive()  # meanwhile the tree is that thread's

    def stop(self) -> None:
        """Begin to end it because time is over, politely first; does not wait."""
        if self._ending is None:
            self.stopped = self._tree.poll() is None
            self._end()

    def watch(self, first_s: float, between_s: float) -> None:
        """Begin to end it, as failed, when it has logged nothing for too long.

        Args:
            first_s: seconds to its first line of metrics, which a resumed run writes too.
            between_s: seconds from a line to the next one.
        """
        if self._ending is not None:
            return
        size, now = _size(self._metrics), time.monotonic()
        if size > self._size:  # a resumed run first drops lines behind its checkpoint
            self._heard, self._lines = now, True
        self._size = size
        limit, option = (between_s, "--step-limit") if self._lines else (first_s, "--first-step-limit")
        if now - self._heard > limit:
            what = "another" if self._lines else "its first"
            # What it says when it is ended is not what it waited for.
            self._why = [
                f"ended: it had not logged {what} step for {limit:.0f} s ({option})",
                *last_error(self._said())[-3:],
            ]
            self._end()

    def _end(self) -> None:
        self._ending = threading.Thread(target=self._tree.end, name=f"ending {self.run.name}", daemon=True)
        self._ending.start()

    def settle(self, finished: bool) -> list[str]:
        """Write down how it ended.

        Args:
            finished: its last step is in the metrics.

        Returns:
            The error where it failed: neither finished nor stopped.
        """
        attempt = self._record["attempts"][-1]
        code = self._tree.poll()
        attempt |= {"exit_code": code, "seconds": {"total": time.monotonic() - self._started}}
        error = [] if finished or self.stopped else self._error(code)
        if error:
            attempt["error"] = error
        run_directory.write_record(self.run.folder, self._record)
        return error

    def _error(self, code: int | None) -> list[str]:
        if self._why:
            return self._why
        if code == 0:
            return ["the training ended before its last step without an error"]
        return last_error(self._said()) or [f"exit code {code}, and nothing in {self._log}"]

    def _said(self) -> str:
        with self._log.open("rb") as stream:
            stream.seek(self._log_from)
            return stream.read().decode(errors="replace")


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def stop_all(attempts: Iterable[Attempt]) -> None:
    """End them all at once and wait: one after another would take as many times half a minute."""
    attempts = list(attempts)
    for attempt in attempts:
        attempt.stop()
    while not all(attempt.poll() for attempt in attempts):
        with suppress(Stopped):  # Ctrl-C once more: they are being ended, and SIGKILL comes by itself
            time.sleep(0.2)
