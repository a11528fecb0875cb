# SPDX-License-Identifier: Apache-2.0
"""A command that is ended with everything it starts, and a program that can be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
"""How a command is ended: signals, and seconds to wait after each. Ray needs some 5 s to take its workers down."""
GRACE = 10.0
"""Seconds that Ray's processes get to end by themselves after their driver did."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no handler on the way mistakes it for a failure."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stopped` in the block."""

    def stop(signum: int, frame: Any) -> None:
        raise Stopped(signum)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ProcessTree:
    """A command in a session of its own, in which everything stays that it starts: Ray's and vLLM's processes too,
    when their parent is gone. Ctrl-C in the terminal reaches this process alone, which passes it on once.

    Args:
        command: its words.
        log: file to which its output is appended.
        env: its environment.
        cwd: the directory it starts in.
    """

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str], cwd: Path):
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """The command's exit code, or None while it runs."""
        return self._process.poll()

    def end(self, patience: Sequence[tuple[int, float]] = PATIENCE) -> None:
        """End what is left, politely first; being interrupted again makes it less patient.

        Args:
            patience: signals, and seconds to wait after each.
        """
        if self.poll() is not None:
            with suppress(Stopped):
                self._wait(GRACE)
        for signum, seconds in patience:
            alive = self._alive()
            # The driver alone takes Ray down in order; the others are told when that did not help.
            if signum == signal.SIGINT and self._process.pid in alive:
                alive = [self._process.pid]
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            with suppress(Stopped):
                self._wait(seconds)

    def _alive(self) -> list[int]:
        self.poll()  # reap it, or it stays a zombie
        alive = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self._process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
        return alive

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.2)
