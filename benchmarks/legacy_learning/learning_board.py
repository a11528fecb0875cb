# SPDX-License-Identifier: Apache-2.0
"""What ``flashrl bench learning`` shows while it runs: a bar a run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.legacy_learning.learning import Run
from benchmarks.legacy_learning.learning_run import TRIES, State, Status, metrics_of
from benchmarks.legacy_learning.learning_schedule import Event, News
from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT, Metrics
from benchmarks.legacy_learning.tools.report.run import METRICS_FILE

if TYPE_CHECKING:
    from rich.console import Console

_SPEAK_S = 30.0
"""Between two rounds of plain lines about steps, seconds."""


class Board:
    """One line a run and its step.

    Args:
        console: where people read.
        steps: of each run.
    """

    def __init__(self, console: Console, steps: int):
        self._console, self._steps = console, steps
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
        )
        self._bars = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._tasks: dict[str, TaskID] = {}
        self._seen: dict[str, tuple[int, Metrics]] = {}
        self._said: dict[str, int] = {}
        self._spoke = time.monotonic()

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def tell(self, news: News) -> None:
        """Say what happened to a run."""
        name, state = news.state.run.name, news.state
        if news.event is Event.STARTED:
            self._tasks[name] = self._bars.add_task(name, total=self._steps, words="", completed=state.resumes_at)
            at = f" at step {state.resumes_at}" if state.resumes_at else ""
            self.line(f"{name}: {news.event.value}{at}, log in {state.run.folder}")
            return
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        self.line(f"{name}: {news.event.value}{_where(news)}")
        for text in state.error if news.event is Event.FAILED else ():
            self.line(f"  {text}")

    def watch(self, running: Sequence[Run]) -> None:
        """Show how far these are."""
        speaks = not self._console.is_terminal and time.monotonic() - self._spoke >= _SPEAK_S
        for run in running:
            metrics = self._metrics(run)
            if run.name in self._tasks:
                self._bars.update(self._tasks[run.name], completed=metrics.last_step, words=_accuracy(metrics))
            if speaks and metrics.rows and self._said.get(run.name) != metrics.last_step:
                self._said[run.name] = metrics.last_step
                words = _accuracy(metrics)
                self.line(f"{run.name}: step {metrics.last_step}/{self._steps}{words and f', {words}'}")
        if speaks:
            self._spoke = time.monotonic()

    def line(self, text: str) -> None:
        """Print above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _metrics(self, run: Run) -> Metrics:
        """Read again only when the file has changed."""
        file = run.folder / METRICS_FILE
        changed = file.stat().st_mtime_ns if file.is_file() else 0
        if run.name not in self._seen or self._seen[run.name][0] != changed:
            self._seen[run.name] = changed, metrics_of(run)
        return self._seen[run.name][1]


def summary(states: Sequence[State]) -> str:
    """How many runs are in which state."""
    counts = {status: sum(state.status is status for state in states) for status in Status}
    return ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)


def what_is_left(before: Sequence[State], after: Sequence[State], steps: int, minutes: float, *, stopped: bool) -> str:
    """What is left of the training, and how long it takes at the pace of this command: all that is done twice is in it,
    what fewer runs at a time than now would take longer is not, nor is asking the models in BF16.

    Args:
        before: the runs when it began.
        after: when it ended.
        steps: of each run.
        minutes: in between.
        stopped: by the user, before time was over.
    """
    done = {state.run: _done(state, steps) for state in before}
    gained = sum(_done(state, steps) - done[state.run] for state in after)
    wanted = [state for state in after if state.status is not Status.FAILED]
    left = sum(steps - _done(state, steps) for state in wanted)
    if not left:
        return "validations are left"  # verl saves the last step before it validates
    words = f"{left} of {steps * len(wanted)} steps are left"
    if gained > 0:
        return f"{words}, by estimate {max(1, round(left * minutes / gained))} minutes at this command's pace"
    failed = sum(state.failures for state in after) > sum(state.failures for state in before)
    return f"{words}, and none was saved this time" + ("" if stopped or failed else ": more --minutes")


def _done(state: State, steps: int) -> int:
    """Steps of a run that are not done again."""
    return steps if state.status is Status.FINISHED else state.resumes_at


def _where(news: News) -> str:
    state = news.state
    if news.event is Event.FINISHED:
        return ""
    if news.event is Event.STOPPED:
        return f", at step {state.step}; goes on from step {state.resumes_at}"
    more = "is tried once more" if state.failures < TRIES else "is not tried again"
    return f" at step {state.step} and {more} (log: {state.run.folder / 'train.log'}):"


def _accuracy(metrics: Metrics) -> str:
    for key in metrics.keys(HELD_OUT)[:1]:
        steps, values = metrics.series(key)
        return f"accuracy {values[-1]:.3f} at step {steps[-1]}"
    return ""
