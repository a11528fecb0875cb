# SPDX-License-Identifier: Apache-2.0
"""Which run of ``flashrl bench learning`` goes when: so many at a time, started one after another, ended when time is
over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from benchmarks.legacy_learning.learning import Run
from benchmarks.legacy_learning.learning_run import (
    TRIES,
    Attempt,
    State,
    Status,
    checkpoint_of,
    metrics_of,
    process_of,
    state_of,
    states_of,
    stop_all,
)
from flashrl_verl.errors import ConfigError, FlashRLError
from benchmarks.legacy_learning.tools.process_tree import stoppable
from benchmarks.legacy_learning.tools.run_directory import LOG_FILE

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many at a time, and for how long."""

    parallel: int
    gpus: tuple[str, ...] = ()
    """In the words of ``CUDA_VISIBLE_DEVICES``; a run sees the one with the fewest. None: it sees what this process
    does."""
    seconds: float
    """For everything that is scheduled, until the last process is gone."""
    stagger_s: float = 15.0
    """Between two starts: importing torch, vLLM and verl keeps a core busy for as long, and two Rays do not look for
    ports at the same moment."""
    start_s: float = 150.0
    """With less than this left no run is started: start-up alone may take a minute where several runs share the
    cores."""
    ending_s: float = 45.0
    """Kept for ending what runs: ``process_tree.PATIENCE`` comes to 35 s, and the report is still to be written."""
    closing_s: float = 40.0
    """Before time is over: from then on a run is ended as soon as it has saved a step and logged it, so that less is
    done twice."""
    first_s: float
    """To a run's first line of metrics, its start-up and its first validation included."""
    between_s: float
    """From a line of metrics to the next. Whoever waits longer waits for something that does not come."""
    poll_s: float = 1.0
    """Between two looks."""


def stagger(cores: int) -> float:
    """``Limits.stagger_s`` for a machine: what keeps one of 64 cores busy leaves room for the next start."""
    return min(Limits.stagger_s, max(3.0, 240.0 / cores))


class Event(Enum):
    """What happened to a run."""

    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped: time is over"


@dataclass(frozen=True, kw_only=True)
class News:
    """An event of one run, and its state after it."""

    event: Event
    state: State


Prepare = Callable[[Run], tuple[Sequence[str], dict[str, Any], "DictConfig"]]
"""Of a run: the words of its command, the facts of its record, its configuration."""


class Schedule:
    """Carries out runs.

    Args:
        runs: all that are wanted; what is finished, or failed ``TRIES`` times, is left alone.
        steps: of each.
        limits: how many, how long.
        prepare: told the run that is about to start.
        tell: called with news.
        watch: called at every look with the runs that are going on.
        retry: what failed ``TRIES`` times gets one more.

    Raises:
        ConfigError: one of the runs is going on: two processes would write its files.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        steps: int,
        limits: Limits,
        prepare: Prepare,
        tell: Callable[[News], None] = lambda news: None,
        watch: Callable[[list[Run]], None] = lambda running: None,
        *,
        retry: bool = False,
    ):
        for run in runs:
            if (pid := process_of(run.folder)) is not None:
                raise ConfigError(
                    f"{run.name} is going on as process {pid}: another command has this --output, or was killed and "
                    f"left it. Wait for it, or end it: kill -INT {pid}"
                )
        self._runs = runs
        self._steps, self._limits, self._prepare, self._tell, self._watch = steps, limits, prepare, tell, watch
        states = states_of(runs, steps)
        wanted = (Status.NEW, Status.UNFINISHED, *([Status.FAILED] if retry else []))
        left = [state for state in states if state.status in wanted]
        # What is begun first: its checkpoint is worth more than another beginning.
        self._waiting = [state.run for state in sorted(left, key=lambda state: state.status is Status.NEW)]
        self._going: list[Attempt] = []
        self._failures: Counter[Run] = Counter()
        """Of this command's attempts: what failed under an earlier one may have been mended."""
        self._next_start = 0.0

    def carry_out(self) -> None:
        """Until all are done, or time is over; nothing runs when it returns or raises.

        Raises:
            Stopped: Ctrl-C or SIGTERM.
            FlashRLError: two runs failed, or one ``TRIES`` times, and no run has ever trained a step.
        """
        over = time.monotonic() + self._limits.seconds - self._limits.ending_s
        with stoppable():
            try:
                while self._going or self._waiting:
                    left = over - time.monotonic()
                    if left <= 0 or (not self._going and left < self._limits.start_s):
                        break
                    self._start_one(left)
                    self._look()
                    if left <= self._limits.closing_s:
                        self._close()
                    self._watch([attempt.run for attempt in self._going])
                    time.sleep(min(self._limits.poll_s, max(0.0, left)))
            finally:
                self._end()

    def _start_one(self, left: float) -> None:
        limits = self._limits
        free = len(self._going) < limits.parallel and time.monotonic() >= self._next_start
        if not self._waiting or not free or left < limits.start_s or self._hopeless():
            return
        run = self._waiting.pop(0)
        self._next_start = time.monotonic() + limits.stagger_s
        self._going.append(Attempt(run, *self._prepare(run), gpu=self._idlest()))
        self._tell(News(event=Event.STARTED, state=state_of(run, self._steps)))

    def _idlest(self) -> str | None:
        busy = Counter(attempt.gpu for attempt in self._going)
        return min(self._limits.gpus, key=lambda gpu: busy[gpu], default=None)

    def _look(self) -> None:
        for attempt in self._going:
            attempt.watch(self._limits.first_s, self._limits.between_s)
        for attempt in [attempt for attempt in self._going if attempt.poll()]:
            self._going.remove(attempt)
            if self._settle(attempt) is not Event.FAILED:
                continue
            self._failures[attempt.run] += 1
            if state_of(attempt.run, self._steps).failures < TRIES:
                self._waiting.append(attempt.run)
        if not self._going and self._hopeless():
            raise FlashRLError(self._why_hopeless())

    def _hopeless(self) -> bool:
        """Whether what went wrong is likely to go wrong in every run. A single failure may be a neighbour's doing (see
        ``TRIES``), and what is still starting may show that it was."""
        often = len(self._failures) > 1 or any(count >= TRIES for count in self._failures.values())
        return often and not any(state_of(run, self._steps).step for run in self._runs)

    def _why_hopeless(self) -> str:
        names = [f"{run.name}{f' ({count} times)' if count > 1 else ''}" for run, count in self._failures.items()]
        last = next(reversed(self._failures))
        failed = any(state_of(run, self._steps).status is Status.FAILED for run in self._failures)
        return (
            f"{', '.join(names)} failed before {'their' if len(names) > 1 else 'its'} first step, as any run would: "
            f"none has trained a step yet. What was said is above and in {last.folder / LOG_FILE}"
            + (". What failed twice is tried again with --retry" if failed else "")
        )

    def _close(self) -> None:
        for attempt in self._going:
            there = checkpoint_of(attempt.run.folder)
            # verl saves a step, validates if that is due, and then logs it: ended in between, its figures would be
            # lost, for it is not trained again.
            logged = metrics_of(attempt.run).last_step >= there
            if attempt.checkpoint is None:
                attempt.checkpoint = there if logged else there - 1
            elif attempt.checkpoint != there < self._steps and logged:  # the last one is followed by a validation
                attempt.stop()

    def _settle(self, attempt: Attempt) -> Event:
        finished = state_of(attempt.run, self._steps).status is Status.FINISHED
        attempt.settle(finished)
        event = Event.FINISHED if finished else Event.STOPPED if attempt.stopped else Event.FAILED
        self._tell(News(event=event, state=state_of(attempt.run, self._steps)))
        return event

    def _end(self) -> None:
        """End what runs. What ended by itself just now is settled as such: its failure is not to be lost."""
        going, self._going = self._going, []
        stop_all(going)
        for attempt in going:
            self._settle(attempt)
