# SPDX-License-Identifier: Apache-2.0
"""A command with everything it starts: watched for memory, and ended as a whole."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
"""How the training is ended: signals, and seconds to wait after each. Ray needs some 5 s to take its workers
down."""
GRACE = 10.0
"""Seconds that Ray's processes get to end by themselves after their driver did."""
_CHILDREN_S = 5.0
"""Seconds between two looks for new children where memory is not measured: a look reads every process of the
machine."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no handler on the way mistakes it for a failure."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum


@contextmanager
def stoppable() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise Stopped(signum)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ProcessTree:
    """The training, everything it starts, and the most memory they took together with this process.

    Args:
        command: its words.
        log: file that takes its output, after what is in it.
        env: its environment.
        cwd: the directory it starts in.
        memory: measure it at each look. That walks every process's page table under the lock that its allocations take,
            which what is timed would notice; without it ``peak_bytes`` stays 0, and new children are looked for every
            few seconds.
    """

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str], cwd: Path, *, memory: bool = True):
        with log.open("ab") as stream:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we pass it on once.
            self._process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._root = psutil.Process(self._process.pid)
        self._seen: set[psutil.Process] = {self._root}
        self._memory, self._next_look = memory, 0.0
        self.peak_bytes, self.memory_kind = 0, "PSS"

    def identity(self) -> dict[str, float]:
        """Number and time of creation of the command's process: together they are no other's."""
        return {"pid": self._root.pid, "created": self._root.create_time()}

    def poll(self) -> int | None:
        """Look at the tree once. Returns the exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            return code
        if self._memory or time.monotonic() >= self._next_look:
            self._remember_children()
        if self._memory:
            total = sum(self._bytes(process) for process in (psutil.Process(), *self._seen))
            self.peak_bytes = max(self.peak_bytes, total)
        return None

    def _remember_children(self) -> None:
        """While their parent lives: Ray's workers become orphans when it dies."""
        with suppress(psutil.NoSuchProcess):
            self._seen.update(self._root.children(recursive=True))
        self._next_look = time.monotonic() + _CHILDREN_S

    def _bytes(self, process: psutil.Process) -> int:
        """Proportional set size: memory that several processes share (Ray's object store) counts once in the
        sum."""
        try:
            return process.memory_full_info().pss
        except psutil.NoSuchProcess:
            self._seen.discard(process)
        except (psutil.AccessDenied, AttributeError):
            self.memory_kind = "RSS, shared memory counted repeatedly"
            try:
                return process.memory_info().rss
            except psutil.Error:
                pass
        return 0

    def end(self, patience: Sequence[tuple[int, float]] = PATIENCE) -> None:
        """End what is left of the tree, politely first; being interrupted again makes it less patient.

        Args:
            patience: signals, and seconds to wait after each.
        """
        if self._process.poll() is None:
            self._remember_children()
        else:
            with suppress(Stopped):
                self._wait(GRACE)
        for signum, seconds in patience:
            alive = self._alive()
            if not alive:
                return
            # The driver alone takes Ray down in order; the others are told when that did not help.
            for process in [self._root] if signum == signal.SIGINT and self._root in alive else alive:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)
            with suppress(Stopped):
                self._wait(seconds)

    def _alive(self) -> list[psutil.Process]:
        self._process.poll()  # reap it, or it stays a zombie
        alive = []
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.2)
